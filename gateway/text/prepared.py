"""The prompts of a request as token ids, ready for engines, and their compact form for messages between processes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

import msgspec

from engine import wire
from gateway.output.answer import AnswerFormat
from gateway.process.time_slices import TimeSlice
from gateway.text.image_ids import ID_BYTES, ImageIds, PackedImage, pack_images, spans_of, unpack_image, with_spans

Ids = Sequence[int]
"""Token ids: a list, or an array of unsigned 32-bit integers."""


class PlacedIds(array):  # type: ignore[type-arg]
    """Token ids of a prompt with a registered item."""

    __slots__ = ("content", "place")
    content: bytes
    """Digest of the item, and the bytes of the row's tokens that depend on the query too: what hashing the row would tell, in a
    fraction of the time."""
    place: int
    """Number that places the item on a replica. It does not depend on the query, unlike the last tokens of the row."""


def content_of(ids: Ids) -> bytes | array[int]:
    """Return what stands for ``ids`` in digests."""
    if isinstance(ids, PlacedIds | ImageIds):
        return ids.content
    return ids if isinstance(ids, array) else array("I", ids)


class Items(msgspec.Struct, frozen=True, array_like=True):
    """Items of a conversation. They are not objects of their own, because decoding thousands of these blocks the event loop."""

    ids: list[str] = []
    content: bytes = b""
    """The items as JSON values, with commas between them."""
    ends: bytes = b""
    """End of each item in ``content``, as uint32."""

    @classmethod
    def of(cls, items: Iterable[tuple[str, bytes]]) -> Self:
        """Create from pairs of id and JSON."""
        pairs = list(items)
        ends = accumulate((len(content) + 1 for _, content in pairs), initial=-1)
        return cls([id for id, _ in pairs], b",".join([content for _, content in pairs]), array("I", list(ends)[1:]).tobytes())

    def at(self, place: int) -> bytes:
        """Return item ``place`` as JSON."""
        ends = memoryview(self.ends).cast("I")
        return self.content[ends[place - 1] + 1 if place else 0 : ends[place]]


class Refusal(msgspec.Struct, frozen=True):
    """The error of one item."""

    index: int
    message: str
    code: str | None = None


@dataclass(slots=True)
class Prepared:
    """Tokenised prompts: prompt i is ``prefix``, ``rows[i]`` and ``suffix``, one after another."""

    rows: Sequence[Ids]
    prefix: Ids = ()
    suffix: Ids = ()
    """Not empty where items come first: each row is then a prefix worth caching, and the suffix is computed for each."""
    labels: list[int] = field(default_factory=list)
    """Label ids of a score request."""
    texts: list[str] | None = None
    """Texts of the prompts, if they are to be echoed."""
    param: str = ""
    """Field of the request that holds the prompts: ``NAME`` for one prompt, ``NAME[]`` for a list."""
    truncated: list[int] = field(default_factory=list)
    """Indices of the items whose text was cut."""
    query_truncated: bool = False
    """Whether the query was cut."""
    refused: list[Refusal] = field(default_factory=list)
    """Items without a row, in a request that accepts partial results."""
    response: bytes | memoryview = b""
    """Response body as JSON, if no engine takes part in the request; for `/v1/responses`, the instructions as JSON."""
    grammar: str = ""
    """Grammar of llguidance that the output follows; empty if there is none."""
    bad_words: list[list[int]] = field(default_factory=list)
    """Tokens of each text that must not be generated."""
    converted: int = 0
    """Number of tokens in ``response``; they are not in ``rows``, because the event loop does not need them."""
    format: AnswerFormat | None = None
    """How the answer is divided into parts; None for an answer that is all text."""
    items: Items = field(default_factory=Items)
    """Input items of a response that is to be stored."""
    images: list[wire.Image] = field(default_factory=list)
    """Images of all prompts, each once. Their tokens are ``wire.IMAGE_TOKENS`` plus the place here."""
    ids: Sequence[str] | None = None
    """Id of the item of each row, if it is registered in a catalogue. It does not come from a worker."""

    @property
    def places(self) -> Sequence[int]:
        """Index of the item of each row."""
        if not self.refused:
            return range(len(self.rows))
        refused = {refusal.index for refusal in self.refused}
        return [place for place in range(len(self.rows) + len(refused)) if place not in refused]

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts."""
        return self.converted + (len(self.prefix) + len(self.suffix)) * len(self.rows) + sum(map(len, self.rows))

    def param_of(self, index: int) -> str:
        """Return the field of the request that holds prompt ``index``."""
        return self.param.replace("[]", f"[{index}]")


class Packed(msgspec.Struct, tag="packed", frozen=True):
    """:class:`Prepared` with arrays as bytes (uint32, native byte order)."""

    prefix: bytes
    suffix: bytes
    ids: memoryview
    """Token ids of all rows. These and ``response`` may be megabytes: decoding the message does not copy them."""
    lengths: bytes
    """Length of each row."""
    labels: list[int]
    texts: list[str] | None
    param: str
    truncated: list[int] = []
    query_truncated: bool = False
    refused: list[Refusal] = []
    response: memoryview = memoryview(b"")
    grammar: str = ""
    bad_words: list[list[int]] = []
    converted: int = 0
    format: AnswerFormat | None = None
    items: Items = Items()
    images: list[PackedImage] = []
    spans: bytes = b""
    """Where images are in the prompts, see :func:`gateway.text.image_ids.spans_of`."""


def as_list(ids: Ids) -> list[int]:
    """Return ``ids`` as a list, the form of messages to engines."""
    return ids if isinstance(ids, list) else list(ids)


def pack(prepared: Prepared) -> Packed:
    """Convert for another process."""
    ids = array("I")
    for row in prepared.rows:
        ids.extend(row)
    lengths = array("I", map(len, prepared.rows))
    prefix = array("I", prepared.prefix)
    return Packed(
        prefix.tobytes(),
        array("I", prepared.suffix).tobytes(),
        memoryview(ids).cast("B"),
        lengths.tobytes(),
        prepared.labels,
        prepared.texts,
        prepared.param,
        prepared.truncated,
        prepared.query_truncated,
        prepared.refused,
        memoryview(prepared.response),
        prepared.grammar,
        prepared.bad_words,
        prepared.converted,
        prepared.format,
        prepared.items,
        pack_images(prepared.images),
        spans_of(prepared.prefix, prepared.suffix, prepared.rows) if prepared.images else b"",
    )


def unpack(packed: Packed) -> Prepared:
    """Convert from another process. The rows are arrays."""
    return _unpacked(packed, list(_rows(packed)), [*map(unpack_image, packed.images)])


async def unpack_large(packed: Packed) -> Prepared:
    """:func:`unpack` in slices, so that the event loop serves other requests in between."""
    rows, time_slice = [], TimeSlice()
    for row in _rows(packed):
        rows.append(row)
        if time_slice.over:
            await time_slice.yield_to_loop()
    images = []
    for image in packed.images:
        images.append(unpack_image(image))
        await asyncio.sleep(0)
    return _unpacked(packed, rows, images)


def _unpacked(packed: Packed, rows: list[array[int]], images: list[wire.Image]) -> Prepared:
    prefix, suffix = array("I", packed.prefix), array("I", packed.suffix)
    if images:
        prefix, suffix, *rows = with_spans([prefix, suffix, *rows], packed.spans, images)
    return Prepared(
        rows,
        prefix,
        suffix,
        packed.labels,
        packed.texts,
        packed.param,
        packed.truncated,
        packed.query_truncated,
        packed.refused,
        packed.response,
        packed.grammar,
        packed.bad_words,
        packed.converted,
        packed.format,
        packed.items,
        images,
    )


def _rows(packed: Packed) -> Iterator[array[int]]:
    start = 0
    for length in array("I", packed.lengths):
        end = start + length * ID_BYTES
        row = array("I")
        row.frombytes(packed.ids[start:end])
        yield row
        start = end
