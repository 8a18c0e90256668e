"""Prompts of one request that are ready for an engine, and the bounds on them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.wire import IMAGE_TOKENS, VisionInfo
from yardstick_llm.gateway.errors import ContextExceeded, InvalidRequest
from yardstick_llm.gateway.output.answer import AnswerFormat
from yardstick_llm.gateway.process.event_loop import TimeSlice


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that are checked before anything is copied, tokenised or queued."""

    max_sequences: int = 1024
    """Sequences to generate: prompts times ``n``."""
    max_request_tokens: int = 1 << 20
    """Prompt tokens. A prefix shared by prompts counts once; with ``echo``, prompts count per completion."""
    max_request_characters: int = 16 << 20
    """Characters of query and items, joined, for a model whose tokeniser has no safe cuts in the query."""
    max_scores: int = 1 << 20
    """Items times labels."""
    template_seconds: float = 2.0
    """Time that a model's chat template may take with a request's messages."""
    max_image_pixels: int = 1 << 25
    """Pixels of all images of one request, as the headers of their files give them."""
    max_image_tokens: int = 1 << 14
    """Tokens of all images of one request together; an image that occurs again counts once."""

    def check(self, bound: str, count: int, what: str, param: str) -> None:
        """Raise :class:`InvalidRequest` if ``count`` exceeds the field ``bound``. ``what`` names the counted things."""
        most: int = getattr(self, bound)
        if count > most:
            raise InvalidRequest(
                f"The request has {count} {what}; at most {most} are accepted (the server's `{bound}`)."
                " Send it in several requests.",
                param=param,
            )


UNBOUND = Bounds(2**63 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1)
"""Bounds for callers whose input is trusted."""


class TooManyTokens(ValueError):
    """A text has more tokens than allowed."""

    def __init__(self, count: int, *, exact: bool) -> None:
        """``exact``: the text has exactly ``count`` tokens; otherwise it has more than ``count``."""
        super().__init__(f"{'' if exact else 'more than '}{count} tokens")
        self.count = count
        self.exact = exact


NEVER_CUT = "Shorten it: a prompt is never cut."


class Facts(msgspec.Struct, frozen=True):
    """Properties of one model."""

    name: str
    """The model name that clients send as ``model``."""
    context: int
    """Largest number of prompt and completion tokens together."""
    vocab_size: int
    """Number of rows of the model's head."""
    max_labels: int
    """Most labels of one score request."""
    vision: VisionInfo | None = None
    """How images are prepared; None for a model that reads text only."""
    encoder: bool = False
    """Whether prompts are computed whole, and a prefix and a branch are a pair of texts."""

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise :class:`InvalidRequest` unless all of a prompt's ``ids`` are below the vocabulary size. Decoders refuse negative
        ones."""
        if not ids or max(ids) < self.vocab_size:
            return
        place, id = next((place, id) for place, id in enumerate(ids) if id >= self.vocab_size)
        message = f"`{param}[{place}]`: {id} is not a token of {self.name!r}; ids are 0 to {self.vocab_size - 1}."
        raise InvalidRequest(message, param=f"{param}[{place}]")

    def check_prompt(self, length: int, param: str, *, room: int = 0) -> None:
        """Raise :class:`ContextExceeded` unless a prompt of ``length`` tokens and ``room`` more fit in the context."""
        if length + room > self.context:
            raise self._exceeded(f"{length} tokens{' and leaves no room for an answer' if room else ''}", param)

    def too_long(self, tokens: TooManyTokens, param: str, *, remedy: str = NEVER_CUT) -> ContextExceeded:
        """Return the error for a prompt that has more tokens than the context holds."""
        return self._exceeded(str(tokens), param, remedy)

    def _exceeded(self, length: str, param: str, remedy: str = NEVER_CUT) -> ContextExceeded:
        # LiteLLM, Roo Code and other clients that shorten a conversation search for these words, not for the code.
        message = (
            f"`{param}`: the prompt is too long for {self.name!r}: it has {length}, and this model's maximum context length is "
            f"{self.context} tokens. {remedy}"
        )
        return ContextExceeded(message, param=param)


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
    def of(cls, ids: array[int], spans: list[Span], images: Sequence[wire.Image]) -> Self:
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
    """:class:`engine.wire.Image` whose pixels are not copied when the message is decoded."""

    digest: bytes
    rows: int
    columns: int
    pixels: memoryview


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


def with_spans(parts: list[array[int]], packed: bytes, images: Sequence[wire.Image]) -> list[array[int]]:
    """Return ``parts`` (prefix, suffix and rows), with those that have images as :class:`ImageIds`. ``packed``: of
    :func:`spans_of`."""
    spans: dict[int, list[Span]] = {}
    numbers = iter(array("I", packed))
    for part, *span in zip(numbers, numbers, numbers, numbers, strict=True):
        spans.setdefault(part, []).append(Span(*span))
    for number, found in spans.items():
        parts[number] = ImageIds.of(parts[number], found, images)
    return parts


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


class PairIds(array):  # type: ignore[type-arg]
    """Token ids of a pair of texts for an encoder."""

    __slots__ = ("seam",)
    seam: int
    """Number of tokens of the first text, with the special tokens around it."""

    @property
    def content(self) -> bytes:
        """The seam and the tokens. No token id is written like the seam's end."""
        return b"%d\0" % self.seam + self.tobytes()


def content_of(ids: Ids) -> bytes | array[int]:
    """Return what stands for ``ids`` in digests."""
    if isinstance(ids, PlacedIds | ImageIds | PairIds):
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


class Prepared(msgspec.Struct):
    """Tokenised prompts: prompt i is ``prefix``, ``rows[i]`` and ``suffix``, one after another."""

    rows: Sequence[Ids]
    prefix: Ids = ()
    suffix: Ids = ()
    """Not empty where items come first: each row is then a prefix worth caching, and the suffix is computed for each."""
    labels: list[int] = []
    """Label ids of a score request."""
    texts: list[str] | None = None
    """Texts of the prompts, if they are to be echoed."""
    param: str = ""
    """Field of the request that holds the prompts: ``NAME`` for one prompt, ``NAME[]`` for a list."""
    truncated: list[int] = []
    """Indices of the items whose text was cut."""
    query_truncated: bool = False
    """Whether the query was cut."""
    refused: list[Refusal] = []
    """Items without a row, in a request that accepts partial results."""
    response: memoryview = memoryview(b"")
    """Response body as JSON, if no engine takes part in the request; for `/v1/responses`, the instructions as JSON."""
    grammar: str = ""
    """Grammar of llguidance that the output follows; empty if there is none."""
    bad_words: list[list[int]] = []
    """Tokens of each text that must not be generated."""
    converted: int = 0
    """Number of tokens in ``response``; they are not in ``rows``, because the event loop does not need them."""
    format: AnswerFormat | None = None
    """How the answer is divided into parts; None for an answer that is all text."""
    items: Items = Items()
    """Input items of a response that is to be stored."""
    images: list[wire.Image] = []
    """Images of all prompts, each once. Their tokens are ``wire.IMAGE_TOKENS`` plus the place here."""
    seams: list[int] = []
    """For an encoder and pairs with different first texts: the number of tokens of each row's first text. The rows of another
    process are then :class:`PairIds`."""
    prompt_tokens: int = 0
    """See :attr:`engine.wire.Embedding.prompt_tokens`."""
    queries: int = 0
    """For an embedding model that compares: rows at the beginning that are queries. The others are documents, and the result of
    each is its similarity to the query of the same number, or to the only one."""
    ids: Sequence[str] | None = None
    """Id of the item of each row, if it is registered in a catalogue. It does not come from a worker."""

    @property
    def places(self) -> Sequence[int]:
        """Index of the item of each row, or of each document's row."""
        count = len(self.rows) - self.queries
        if not self.refused:
            return range(count)
        refused = {refusal.index for refusal in self.refused}
        return [place for place in range(count + len(refused)) if place not in refused]

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts."""
        return self.converted + (len(self.prefix) + len(self.suffix)) * len(self.rows) + sum(map(len, self.rows))

    def param_of(self, index: int) -> str:
        """Return the field of the request that holds prompt ``index``."""
        return self.param.replace("[]", f"[{index}]")


class Packed(msgspec.Struct, tag="packed", frozen=True):
    """:class:`Prepared` for another process: arrays are bytes (uint32, native byte order), and what may be megabytes is not copied
    when the message is decoded."""

    rest: Prepared
    """What the other fields do not hold."""
    prefix: bytes
    suffix: bytes
    ids: memoryview
    """Token ids of all rows."""
    lengths: bytes
    """Length of each row."""
    response: memoryview
    images: list[PackedImage]
    spans: bytes
    """Where images are in the prompts, see :func:`spans_of`."""


def as_list(ids: Ids) -> list[int]:
    """Return ``ids`` as a list, the form of messages to engines."""
    return ids if isinstance(ids, list) else list(ids)


def pack(prepared: Prepared) -> Packed:
    """Convert for another process."""
    ids = array("I")
    for row in prepared.rows:
        ids.extend(row)
    return Packed(
        msgspec.structs.replace(prepared, rows=(), prefix=(), suffix=(), response=memoryview(b""), images=[]),
        array("I", prepared.prefix).tobytes(),
        array("I", prepared.suffix).tobytes(),
        memoryview(ids).cast("B"),
        array("I", map(len, prepared.rows)).tobytes(),
        prepared.response,
        [PackedImage(image.digest, image.rows, image.columns, memoryview(image.pixels)) for image in prepared.images],
        spans_of(prepared.prefix, prepared.suffix, prepared.rows) if prepared.images else b"",
    )


async def unpack(packed: Packed) -> Prepared:
    """Convert from another process, in slices, so that the event loop serves other requests in between. The rows are arrays."""
    rows, start, time_slice = [], 0, TimeSlice()
    for length in array("I", packed.lengths):
        end = start + length * ID_BYTES
        row = array("I")
        row.frombytes(packed.ids[start:end])
        rows.append(row)
        start = end
        if time_slice.over:
            await time_slice.yield_to_loop()
    prefix, suffix = array("I", packed.prefix), array("I", packed.suffix)
    images = []
    for image in packed.images:  # copying takes a millisecond for each four megabytes, about
        images.append(wire.Image(image.digest, image.rows, image.columns, bytes(image.pixels)))
        await asyncio.sleep(0)
    if images:
        prefix, suffix, *rows = with_spans([prefix, suffix, *rows], packed.spans, images)
    prepared = packed.rest
    for place, seam in enumerate(prepared.seams):
        rows[place] = pair = PairIds("I", rows[place])
        pair.seam = seam
    prepared.rows, prepared.prefix, prepared.suffix = rows, prefix, suffix
    prepared.response, prepared.images = packed.response, images
    return prepared
