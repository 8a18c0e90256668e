"""Token ids of prompts with images, and images in messages between processes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import msgspec

from engine.wire import IMAGE_TOKENS, Image

ID_BYTES = array("I").itemsize


class Span(NamedTuple):
    """The tokens of one image in a part of a prompt."""

    begin: int
    end: int
    place: int
    """Place of the image in :attr:`gateway.text.prepared.Prepared.images`."""


class ImageIds(array):  # type: ignore[type-arg]
    """Token ids of a part of a prompt that has images."""

    __slots__ = ("content", "spans")
    content: bytes
    """The tokens as digests read them: each image is one token and the image's digest. Equal prompts of any two requests have
    equal contents, joined from their parts, wherever they are divided: no image ever is."""
    spans: list[Span]

    @classmethod
    def of(cls, ids: array[int], spans: list[Span], images: Sequence[Image]) -> Self:
        """Create from ``ids`` and the images in them, in order."""
        row = cls("I", ids)
        whole, last = memoryview(ids).cast("B"), 0
        marker = array("I", [IMAGE_TOKENS]).tobytes()
        parts: list[bytes | memoryview] = []
        for begin, end, place in spans:
            parts += (whole[last * ID_BYTES : begin * ID_BYTES], marker, images[place].digest)
            last = end
        row.content = b"".join([*parts, whole[last * ID_BYTES :]])
        row.spans = spans
        return row


class PackedImage(msgspec.Struct, frozen=True, array_like=True):
    """:class:`Image` whose pixels are not copied when the message is decoded."""

    digest: bytes
    rows: int
    columns: int
    pixels: memoryview


def pack_images(images: Sequence[Image]) -> list[PackedImage]:
    """Convert for another process."""
    return [PackedImage(image.digest, image.rows, image.columns, memoryview(image.pixels)) for image in images]


def unpack_image(packed: PackedImage) -> Image:
    """Convert from another process. Copying takes a millisecond for each four megabytes, about."""
    return Image(packed.digest, packed.rows, packed.columns, bytes(packed.pixels))


def spans_of(prefix: Sequence[int], suffix: Sequence[int], rows: Sequence[Sequence[int]]) -> bytes:
    """Return the images in prefix, suffix and rows: four numbers (uint32) for each, the number of the part (0: the prefix, 1: the
    suffix, then the rows) and its :class:`Span`. The tokens of two images never stand side by side."""
    numbers = array("I")
    for number, row in enumerate([prefix, suffix, *rows]):
        for span in _spans(row):
            numbers.extend((number, *span))
    return numbers.tobytes()


def _spans(row: Sequence[int]) -> Iterator[Span]:
    begin, before = 0, 0
    for position, id in enumerate(row):
        if id != before:
            if before >= IMAGE_TOKENS:
                yield Span(begin, position, before - IMAGE_TOKENS)
            begin, before = position, id
    if before >= IMAGE_TOKENS:
        yield Span(begin, len(row), before - IMAGE_TOKENS)


def with_spans(parts: list[array[int]], packed: bytes, images: Sequence[Image]) -> list[array[int]]:
    """Return ``parts`` (prefix, suffix and rows), with those that have images as :class:`ImageIds`. ``packed``: of
    :func:`spans_of`."""
    spans: dict[int, list[Span]] = {}
    numbers = iter(array("I", packed))
    for part, *span in zip(numbers, numbers, numbers, numbers, strict=True):
        spans.setdefault(part, []).append(Span(*span))
    for number, found in spans.items():
        parts[number] = ImageIds.of(parts[number], found, images)
    return parts
