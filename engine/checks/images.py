"""Checks of the images of a message, and of the places where its prompts show them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine import wire

DIGEST = 16
"""Bytes of a digest."""

Message = wire.Score | wire.ScoreItems | wire.Generate


def problem(message: Message, info: wire.Info) -> str | None:
    """Return the problem with the images of ``message``, as a sentence; None if there is none. Digests were compared with pixels
    before (:mod:`engine.serving.digests`)."""
    if info.vision is None:
        return "This model reads no images."
    return next(_problems(message, info.vision), None)


def as_text(message: Message, vision: wire.VisionInfo) -> Message:
    """Return ``message`` with the token that marks a merged patch in place of the tokens of images."""

    def text(tokens: Sequence[int]) -> list[int]:
        return [vision.image_token if token >= wire.IMAGE_TOKENS else token for token in tokens]

    if isinstance(message, wire.Generate):
        return msgspec.structs.replace(message, prompt=text(message.prompt))
    if isinstance(message, wire.Score):
        return msgspec.structs.replace(message, prefix=text(message.prefix), branches=[text(each) for each in message.branches])
    if len(message.items) % 4:
        return message
    ids = np.frombuffer(message.items, "<i4")
    items = np.where(ids >= wire.IMAGE_TOKENS, np.int32(vision.image_token), ids).astype("<i4").tobytes()
    return msgspec.structs.replace(message, items=items, query=text(message.query))


def _problems(message: Message, vision: wire.VisionInfo) -> Iterator[str]:
    images = message.images
    if len(images) > vision.max_images:
        yield f"{len(images)} images, at most {vision.max_images} are allowed."
    for place, image in enumerate(images):
        yield from _size_problems(place, image, vision)
    total = sum(vision.tokens_of(image) for image in images)
    if total > vision.max_tokens:
        yield f"The images have {total} tokens together, at most {vision.max_tokens} are allowed; send fewer or smaller images."
    for name, tokens in _prompts(message):
        yield from _prompt_problems(name, tokens, images, vision)


def _size_problems(place: int, image: wire.Image, vision: wire.VisionInfo) -> Iterator[str]:
    merge, numbers = vision.merge_size, 3 * vision.patch_size**2
    for name, count in (("rows", image.rows), ("columns", image.columns)):
        if count < merge or count % merge:
            yield f"Image {place} has {count} {name} of patches; a multiple of {merge} is needed."
    patches = image.rows * image.columns
    if patches * vision.patch_size**2 > vision.max_pixels:
        yield f"Image {place} has {patches * vision.patch_size**2} pixels, at most {vision.max_pixels} are allowed."
    if len(image.pixels) != patches * numbers:
        size = f"{image.rows} by {image.columns} patches have {patches * numbers}"
        yield f"Image {place} has {len(image.pixels)} bytes of pixels; {size}."
    if len(image.digest) != DIGEST:
        yield f"The digest of image {place} has {len(image.digest)} bytes; {DIGEST} are needed."


def _prompts(message: Message) -> Iterable[tuple[str, npt.NDArray[np.int64]]]:
    """Parts of prompts, each of which shows whole images, and their names."""
    if isinstance(message, wire.Generate):
        yield "The prompt", _ids(message.prompt)
    elif isinstance(message, wire.Score):
        yield "The prefix", _ids(message.prefix)
        for place, branch in enumerate(message.branches):
            yield f"Branch {place}", _ids(branch)
    else:
        yield "The query", _ids(message.query)
        if len(message.items) % 4 == 0 and len(message.lengths) % 4 == 0:
            ends = np.cumsum(np.frombuffer(message.lengths, "<i4"))[:-1]
            for place, item in enumerate(np.split(np.frombuffer(message.items, "<i4").astype(np.int64), ends)):
                yield f"Item {place}", item


def _ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Ids beyond 32 bits are as wrong as the largest of these, and -1 as wrong as all below."""
    return np.fromiter((max(-1, min(token, 1 << 32)) for token in tokens), np.int64, len(tokens))


def _prompt_problems(
    name: str, tokens: npt.NDArray[np.int64], images: Sequence[wire.Image], vision: wire.VisionInfo
) -> Iterator[str]:
    shown = tokens >= wire.IMAGE_TOKENS
    if not shown.any():
        return
    if int(tokens.max()) >= wire.IMAGE_TOKENS + len(images):
        yield f"{name} shows image {int(tokens.max()) - wire.IMAGE_TOKENS}, and the message has {len(images)} images."
        return
    marked = np.where(shown, tokens, -1)
    begins = np.flatnonzero(np.diff(marked, prepend=-2))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(tokens)], strict=True):
        if not shown[begin]:
            continue
        place = int(tokens[begin]) - wire.IMAGE_TOKENS
        whole = vision.tokens_of(images[place])
        if (end - begin) % whole:
            yield f"{name} has {end - begin} tokens of image {place} on end; it has {whole}."
