"""The images of one request: checked, decoded once each, and put into the prompts that name them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from engine.wire import IMAGE_TOKENS, Image, VisionInfo
from gateway.errors import ContextExceeded
from gateway.images.data_url import is_data_url, read_data_url
from gateway.images.decode import decode, scanned_pixels
from gateway.images.errors import ImageError, InvalidImage
from gateway.images.patches import prepare
from gateway.schemas.content import ImagePart, TextPart
from gateway.text.bounds import Bounds
from gateway.text.facts import Facts

IMAGE_CHARACTERS = 1 << 17
"""Characters that count for the images of a request, which is then a bulk job."""
SCANS = 12
"""Scans that a JPEG file of the most pixels may have; progressive files have about ten. A smaller one may have more."""
LOW_TOKENS = 256
"""Most tokens of an image whose ``detail`` is ``low``."""


class ImageDecoder:
    """Decodes the images of one request. Equal images are one."""

    def __init__(self, facts: Facts, bounds: Bounds, fetched: Mapping[str, bytes]) -> None:
        """``fetched``: contents of the images that the request names with ``http`` and ``https`` URLs."""
        self.images: list[Image] = []
        self._facts = facts
        self._fetched = fetched
        self._pixels_left = bounds.max_image_pixels
        self._scanned_left = SCANS * bounds.max_image_pixels
        self._tokens_left = bounds.max_image_tokens
        self._most_tokens = bounds.max_image_tokens
        self._known: dict[tuple[bytes, bool], int] = {}  # by the digest of the file
        self._places: dict[bytes, int] = {}  # by the digest of the pixels

    def add(self, part: ImagePart, param: str) -> int:
        """Return the place in :attr:`images` of the image of ``part``, the field ``param``. Raises :class:`InvalidImage`."""
        try:
            return self._add(part)
        except ImageError as error:
            raise InvalidImage(f"`{param}`: the image {error}.", param=param, reason=error.reason) from None

    def _add(self, part: ImagePart) -> int:
        vision = self.vision
        content = self._content(part.url)
        key = hashlib.blake2b(content, digest_size=16).digest(), part.low
        if (known := self._known.get(key)) is not None:
            return known
        picture = decode(content, max_pixels=self._pixels_left, max_scanned=self._scanned_left)
        pixels = picture.width * picture.height
        self._pixels_left -= pixels
        self._scanned_left -= scanned_pixels(pixels, content)
        low = LOW_TOKENS * (vision.patch_size * vision.merge_size) ** 2 if part.low else None
        image = prepare(picture, vision, max_pixels=low)
        if image.digest not in self._places:
            self._count(vision.tokens_of(image))
            self._places[image.digest] = len(self.images)
            self.images.append(image)
        self._known[key] = self._places[image.digest]
        return self._known[key]

    @property
    def vision(self) -> VisionInfo:
        """How the model's images are prepared. Raises :class:`ImageError` for a model that reads no images."""
        if self._facts.vision is None:
            raise ImageError("model", f"cannot be used: the model {self._facts.name!r} reads text only")
        return self._facts.vision

    def _content(self, url: str) -> bytes:
        if is_data_url(url):
            return read_data_url(url)
        if url in self._fetched:
            return self._fetched[url]
        raise ImageError("data_url", "has a URL that is neither a data URL nor one of http or https")

    def _count(self, tokens: int) -> None:
        self._tokens_left -= tokens
        if self._tokens_left < 0:
            most = self._most_tokens
            raise ImageError("tokens", f"is one too many: the images of a request have at most {most} tokens (`max_image_tokens`)")


def urls_of(parts: Iterable[tuple[str, TextPart | ImagePart]]) -> dict[str, str]:
    """Return the ``http`` and ``https`` URLs of images, and the first field with each."""
    urls: dict[str, str] = {}
    for param, part in parts:
        if isinstance(part, ImagePart) and part.url[:8].lower().startswith(("http://", "https://")):
            urls.setdefault(part.url, param)
    return urls


def with_images(
    ids: Sequence[int], places: Sequence[int], at: Sequence[int], images: Sequence[Image], vision: VisionInfo
) -> array[int]:
    """Return ``ids`` with image ``places[i]`` in place of the token at position ``at[i]``."""
    row, last = array("I"), 0
    for place, position in zip(places, at, strict=True):
        row.extend(ids[last:position])
        row.extend(tokens_of(place, images[place], vision))
        last = position + 1
    row.extend(ids[last:])
    return row


def tokens_of(place: int, image: Image, vision: VisionInfo) -> array[int]:
    """Return the tokens of image ``place`` of a request."""
    return array("I", [IMAGE_TOKENS + place]) * vision.tokens_of(image)


def check_images(facts: Facts, images: Sequence[Image], places: Sequence[int], param: str) -> None:
    """Raise :class:`InvalidImage` if a prompt with the images at ``places`` has more than engines take in one message."""
    vision = facts.vision
    assert vision is not None
    distinct = set(places)
    if len(distinct) > vision.max_images:
        message = f"`{param}` has {len(distinct)} images; {facts.name!r} takes at most {vision.max_images}."
        raise InvalidImage(message, param=param, reason="count")
    tokens = sum(vision.tokens_of(images[place]) for place in distinct)
    if vision.max_tokens and tokens > vision.max_tokens:
        message = f"`{param}` has images of {tokens} tokens; {facts.name!r} takes at most {vision.max_tokens}. Send smaller ones."
        raise InvalidImage(message, param=param, reason="tokens")


def check_length(facts: Facts, length: int, param: str) -> None:
    """Raise :class:`ContextExceeded` for a prompt that is too long with its images."""
    if length > facts.context:
        message = f"`{param}`: with its images the prompt is {length} tokens long; the context of {facts.name!r} holds"
        raise ContextExceeded(f"{message} {facts.context}. Send fewer or smaller images.", param=param)
