"""The prompts of a request as token ids, ready for engines, and their compact form for messages between processes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.tools.answer import AnswerFormat

Ids = Sequence[int]
"""Token ids: a list, or an array of unsigned 32-bit integers."""


class Refusal(msgspec.Struct, frozen=True):
    """The error of one item."""

    index: int
    message: str
    code: str | None = None


@dataclass(slots=True)
class Prepared:
    """Tokenised prompts: prompt i is ``prefix`` followed by ``rows[i]``."""

    rows: Sequence[Ids]
    prefix: Ids = ()
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
    response: bytes = b""
    """Response body as JSON, if no engine takes part in the request."""
    grammar: str = ""
    """Grammar of llguidance that the output follows; empty if there is none."""
    bad_words: list[list[int]] = field(default_factory=list)
    """Tokens of each text that must not be generated."""
    converted: int = 0
    """Number of tokens in ``response``; they are not in ``rows``, because the event loop does not need them."""
    format: AnswerFormat | None = None
    """How the answer is divided into parts; None for an answer that is all text."""

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
        return self.converted + len(self.prefix) * len(self.rows) + sum(map(len, self.rows))

    def param_of(self, index: int) -> str:
        """Return the field of the request that holds prompt ``index``."""
        return self.param.replace("[]", f"[{index}]")


class Packed(msgspec.Struct, tag="packed", frozen=True):
    """:class:`Prepared` with arrays as bytes (uint32, native byte order)."""

    prefix: bytes
    ids: bytes
    """Token ids of all rows."""
    lengths: bytes
    """Length of each row."""
    labels: list[int]
    texts: list[str] | None
    param: str
    truncated: list[int] = []
    query_truncated: bool = False
    refused: list[Refusal] = []
    response: bytes = b""
    grammar: str = ""
    bad_words: list[list[int]] = []
    converted: int = 0
    format: AnswerFormat | None = None


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
        ids.tobytes(),
        lengths.tobytes(),
        prepared.labels,
        prepared.texts,
        prepared.param,
        prepared.truncated,
        prepared.query_truncated,
        prepared.refused,
        prepared.response,
        prepared.grammar,
        prepared.bad_words,
        prepared.converted,
        prepared.format,
    )


def unpack(packed: Packed) -> Prepared:
    """Convert from another process. The rows are arrays."""
    rows = list(_rows(array("I", packed.ids), array("I", packed.lengths)))
    return Prepared(
        rows,
        array("I", packed.prefix),
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
    )


def _rows(ids: array[int], lengths: array[int]) -> Iterator[array[int]]:
    start = 0
    for length in lengths:
        yield ids[start : start + length]
        start += length
