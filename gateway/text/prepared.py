"""A request's prompts as token ids, ready to be sent to engines; and their compact form between processes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

Ids = Sequence[int]
"""Token ids: a list, or an array of unsigned 32-bit integers."""


@dataclass(slots=True)
class Prepared:
    """Prompt i is ``prefix`` and ``rows[i]``."""

    rows: Sequence[Ids]
    prefix: Ids = ()
    labels: list[int] = field(default_factory=list)
    """Of a score request."""
    texts: list[str] | None = None
    """The texts of the prompts, where they are to be echoed."""
    param: str = ""
    """The field of the request that holds the prompts; ``NAME`` for one prompt, ``NAME[]`` for a list of them."""

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return len(self.prefix) * len(self.rows) + sum(map(len, self.rows))

    def param_of(self, index: int) -> str:
        """The field of the request that holds a prompt."""
        return self.param.replace("[]", f"[{index}]")


class Packed(msgspec.Struct, tag="packed", frozen=True):
    """The same with arrays as bytes."""

    prefix: bytes
    ids: bytes
    """The ids of all rows."""
    lengths: bytes
    """Of each row."""
    labels: list[int]
    texts: list[str] | None
    param: str


def as_list(ids: Ids) -> list[int]:
    """``ids`` as messages to engines hold them."""
    return ids if isinstance(ids, list) else list(ids)


def pack(prepared: Prepared) -> Packed:
    """For another process."""
    ids = array("I")
    for row in prepared.rows:
        ids.extend(row)
    lengths = array("I", map(len, prepared.rows))
    prefix = array("I", prepared.prefix)
    return Packed(prefix.tobytes(), ids.tobytes(), lengths.tobytes(), prepared.labels, prepared.texts, prepared.param)


def unpack(packed: Packed) -> Prepared:
    """From another process. The rows are arrays."""
    rows = list(_rows(array("I", packed.ids), array("I", packed.lengths)))
    return Prepared(rows, array("I", packed.prefix), packed.labels, packed.texts, packed.param)


def _rows(ids: array[int], lengths: array[int]) -> Iterator[array[int]]:
    start = 0
    for length in lengths:
        yield ids[start : start + length]
        start += length
