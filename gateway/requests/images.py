"""Images of one request: checked, decoded once each, and put into the prompts that name them.

Each image of a query, an item or a document becomes a mark in its text: an added token of the tokeniser with a secret spelling,
which no text of a client can have. Query and items are then tokenised as texts, and the marks are replaced by the images' tokens.
There are two marks, so that images of the query and of an item are told apart wherever the prompt puts their texts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar, cast

import msgspec

from yardstick_llm.engine.wire import IMAGE_TOKENS, Image, VisionInfo
from yardstick_llm.gateway.errors import ContextExceeded, InvalidRequest
from yardstick_llm.gateway.images.decode import (
    ImageError,
    InvalidImage,
    decode,
    is_data_url,
    prepare,
    read_data_url,
    scanned_pixels,
)
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.schemas.common import PAIRED_DOCUMENTS, PAIRED_QUERIES, Content, ImagePart, Paired, Query, TextPart
from yardstick_llm.gateway.schemas.parameters import Parameters
from yardstick_llm.gateway.text.prepared import Bounds, Facts, Prepared, Refusal

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


T = TypeVar("T", bound=Parameters)

QUERY, ITEM = 0, 1
QUERIES = ("query", *PAIRED_QUERIES)
ITEMS = ("items", "texts", "passages", *PAIRED_DOCUMENTS)
FRAME = ("<|vision_start|>", "<|vision_end|>")
"""Tokens around the tokens of an image, in the models of Qwen."""


def reading_content(endpoint: Endpoint[T]) -> Endpoint[T]:
    """Return ``endpoint`` for requests whose texts may be :class:`Content`, lists of parts, or images."""

    def read(request: T, model: Model) -> Prepared:
        return _read(endpoint.read, request, model) if _contents(request) else endpoint.read(request, model)

    def is_light(request: T) -> bool:
        return not _contents(request) and endpoint.is_light(request)

    def characters(request: T, query_once: bool) -> int:
        if not (contents := _contents(request)):
            return endpoint.characters(request, query_once)
        parts = [part for param, content in contents for _, part in _parts_of(content, param)]
        images = any(isinstance(part, ImagePart) for part in parts)
        texts = _with_texts(request, lambda given, param, _: _shown(given, param) if _is_content(given) else given)
        return endpoint.characters(texts, query_once) + images * IMAGE_CHARACTERS

    return replace(endpoint, read=read, is_light=is_light, characters=characters, urls=_urls, least_items=1)


def plain(given: Query) -> str | list[int]:
    """Return a query or an item after contents have become texts."""
    assert not _is_content(given), "contents are texts here"
    return cast("str | list[int]", given)


def texts_of(given: Paired | None) -> list[str]:
    """Return the texts of a field of pairs after contents have become texts."""
    return [] if given is None else [text_of(given)] if isinstance(given, str | Content) else [*map(text_of, given)]


def text_of(given: str | Content) -> str:
    """Return a query or a document after contents have become texts."""
    assert isinstance(given, str), "contents are texts here"
    return given


def _contents(request: msgspec.Struct) -> list[tuple[str, Any]]:
    """Return the queries and items of a request that are neither text nor token ids, and the field of each."""
    found: list[tuple[str, Any]] = []
    for name in (*QUERIES, *ITEMS):
        given = getattr(request, name, None)
        if _is_content(given):
            found.append((name, given))
        elif isinstance(given, list):
            found += [(f"{name}[{number}]", each) for number, each in enumerate(given) if _is_content(each)]
    return found


def _urls(request: msgspec.Struct) -> dict[str, str]:
    return urls_of(chain.from_iterable(_parts_of(content, param) for param, content in _contents(request)))


def _is_content(given: Any) -> bool:
    """Whether a query or an item is a :class:`Content` or a list of parts."""
    if not isinstance(given, list):
        return isinstance(given, Content)
    # Each distinct type is looked at once: a tenth of the time of ``isinstance`` for each token id.
    return any(issubclass(kind, TextPart | ImagePart) for kind in set(map(type, given)))


def _parts_of(content: Any, param: str) -> list[tuple[str, TextPart | ImagePart]]:
    """Return the parts of a content and the field of each. Raises :class:`InvalidRequest`."""
    if isinstance(content, list):
        odd = next((place for place, part in enumerate(content) if isinstance(part, int)), None)
        if odd is not None:
            raise InvalidRequest(f"`{param}` has token ids and parts; send one kind.", param=f"{param}[{odd}]")
        return [(f"{param}[{place}]", part) for place, part in enumerate(content)]
    given = [name for name in ("content", "text", "image") if getattr(content, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"`{param}` needs exactly one of `content`, `text` and `image`.", param=param)
    if content.content is not None:
        return [(f"{param}.content[{place}]", part) for place, part in enumerate(content.content)]
    if content.text is not None:
        return [(f"{param}.text", TextPart(content.text))]
    url: str = content.image
    named = is_data_url(url) or "://" in url[:16]
    return [(f"{param}.image", ImagePart(url if named else f"data:image/any;base64,{url}"))]


class _Converter:
    """Makes texts with marks of contents."""

    def __init__(self, model: Model) -> None:
        self.request = ImageDecoder(model.facts, model.bounds, model.fetched)
        self.places: list[list[list[int]]] = [[], []]
        """Places of the images of each query, and of each item."""
        self._marks = model.texts.tokenizer.image_marks

    def text(self, given: Any, param: str, kind: int) -> Any:
        """Return ``given`` as text, or unchanged if it is text or token ids, and note its images."""
        places: list[int] = []
        self.places[kind].append(places)
        if not _is_content(given):
            return given
        texts = []
        for field_name, part in _parts_of(given, param):
            if isinstance(part, TextPart):
                texts.append(part.text)
            else:
                places.append(self.request.add(part, field_name))
                texts.append(self._marks[kind])
        return "".join(texts)


def _with_texts(request: T, convert: Callable[[Any, str, int], Any]) -> T:
    """Return ``request`` with ``convert(given, field, kind)`` in place of each query and item."""
    texts: dict[str, Any] = {}
    for kind, names in ((QUERY, QUERIES), (ITEM, ITEMS)):
        for name in names:
            given = getattr(request, name, None)
            if given is None:
                continue
            if not isinstance(given, list) or _is_content(given) or (given and isinstance(given[0], int)):
                texts[name] = convert(given, name, kind)
            else:
                texts[name] = [convert(each, f"{name}[{number}]", kind) for number, each in enumerate(given)]
    return msgspec.structs.replace(request, **texts)


def _shown(given: Any, param: str) -> str:
    """Return the texts of a content."""
    return "".join(part.text for _, part in _parts_of(given, param) if isinstance(part, TextPart))


def _read(read: Callable[[T, Model], Prepared], request: T, model: Model) -> Prepared:
    converter = _Converter(model)
    texts = _with_texts(request, converter.text)
    if not converter.request.images:
        return read(texts, model)
    _check_fields(request)
    partial = bool(getattr(request, "partial_results", False))
    return _Expander(model, converter.request, converter.places, partial).expanded(read(texts, model))


def _check_fields(request: msgspec.Struct) -> None:
    """Raise :class:`InvalidRequest` for fields that do not go with images."""
    for name in ("catalogue", "return_documents", "return_text"):
        if getattr(request, name, None):
            raise InvalidRequest(f"`{name}` does not go with images.", param=name)
    if getattr(request, "readout", None) == "likelihood":
        raise InvalidRequest("The readout `likelihood` does not go with images.", param="readout")


class _Expander:
    """Replaces marks by the tokens of images."""

    def __init__(self, model: Model, request: ImageDecoder, places: list[list[list[int]]], partial: bool) -> None:
        """``places``: of the images of each query, and of each item."""
        self._model = model
        self._images = request.images
        self._vision = request.vision
        self._queries, self._items = places
        self._partial = partial
        tokenizer = model.texts.tokenizer
        self._kinds = {tokenizer.image_mark_ids[kind]: kind for kind in (QUERY, ITEM)}
        begin, end = map(tokenizer.token_of, FRAME)
        if begin is None or end is None:
            message = f"The tokeniser of {model.facts.name!r} has no {FRAME[0]}, so images can be sent in chats only."
            raise InvalidImage(message, param="model", reason="model")
        self._begin, self._end = begin, end

    def expanded(self, prepared: Prepared) -> Prepared:
        """Return ``prepared`` with images. Raises :class:`InvalidRequest`."""
        prefix, tail = self._divided(prepared.prefix)
        rows, refused = [], []
        suffix_marks = self._count(prepared.suffix)
        tokens = len(prefix) + len(prepared.suffix)
        for place, row in zip(prepared.places, prepared.rows, strict=True):
            query, item = self._queries[place if len(self._queries) > 1 else 0], self._items[place]
            param = prepared.param.replace("[]", f"[{place}]")
            check_images(self._model.facts, self._images, [*query, *item], param)
            whole = self._with_images(chain(tail, row), query, item, self._count(prefix))
            shared = len(self._with_images(prefix, query, [], 0)) + len(self._with_images(prepared.suffix, query, [], 0))
            try:
                check_length(self._model.facts, shared + len(whole), param)
            except ContextExceeded as error:
                if not self._partial:
                    raise
                refused.append(Refusal(place, error.message, error.code))
                continue
            tokens += len(whole)
            self._model.bounds.check("max_request_tokens", tokens, "tokens or more", param)
            rows.append(whole)
        query = self._queries[0]
        offset = len(query) - suffix_marks if query else 0
        return msgspec.structs.replace(
            prepared,
            rows=rows,
            prefix=self._with_images(prefix, query, [], 0),
            suffix=self._with_images(prepared.suffix, query, [], offset),
            refused=sorted([*prepared.refused, *refused], key=lambda refusal: refusal.index),
            images=self._images,
        )

    def _divided(self, prefix: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Divide a prefix before its first mark that may stand for different images in different prompts."""
        same = len(self._queries) == 1
        for position, id in enumerate(prefix):
            kind = self._kinds.get(id)
            if kind == ITEM or (kind == QUERY and not same):
                return prefix[:position], prefix[position:]
        return prefix, ()

    def _count(self, ids: Sequence[int]) -> int:
        return sum(id in self._kinds for id in ids)

    def _with_images(self, ids: Any, query: Sequence[int], item: Sequence[int], before: int) -> array[int]:
        """Replace the marks in a part of a prompt. ``before``: number of the query's images in front of the part. A template that
        repeats a text repeats its images."""
        row, seen, places = array("I"), [before, 0], (query, item)
        for id in ids:
            kind = self._kinds.get(id)
            if kind is None:
                row.append(id)
                continue
            image = places[kind][seen[kind] % len(places[kind])]
            seen[kind] += 1
            row.append(self._begin)
            row.extend(tokens_of(image, self._images[image], self._vision))
            row.append(self._end)
        return row
