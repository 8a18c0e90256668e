"""Byte-level BPE in compact tables, so that the gateway's process can tokenise words without the ``tokenizers`` library.

The library reads a ``tokenizer.json`` for seconds while it holds the interpreter's lock. These tables are bytes, which a worker's
parent makes and which need no reading. They serve single pieces (``pieces.py``): a word of the length that occurs takes some 20 µs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from gateway.text.spelling import BYTE_OF

_SHIFT = 32
_NEVER = 1 << 32


class MergeTable(msgspec.Struct, frozen=True):
    """The merges of a byte-level BPE, in a form that is cheap to send."""

    bytes_: bytes
    """Token of each byte, as uint32."""
    pairs: bytes
    """Each pair of tokens that merge, the left one times 2**32 plus the right one, ascending, as uint64."""
    ranks: bytes
    """The rank of each pair, as uint32; the lowest one merges first."""
    merged: bytes
    """The token that each pair becomes, as uint32."""
    whole: bytes = b""
    """All tokens by their bytes, ascending, as uint32, if a piece that is a token is not divided; otherwise empty."""


def merge_table(document: dict[str, Any], spelled: Callable[[int], bytes]) -> MergeTable:
    """Return the merges of a ``tokenizer.json`` that has safe cuts (``cuts.py``). ``spelled``: bytes of a token."""
    model = document["model"]
    vocab: dict[str, int] = model["vocab"]
    found: dict[int, tuple[int, int]] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        found[vocab[left] << _SHIFT | vocab[right]] = (rank, vocab[left + right])  # of equal pairs, the library keeps the last
    pairs = sorted(found)
    whole = sorted(vocab.values(), key=spelled) if model.get("ignore_merges") else []
    of_bytes = {byte: vocab[char] for char, byte in BYTE_OF.items()}
    return MergeTable(
        array("I", [of_bytes[byte] for byte in range(256)]).tobytes(),
        array("Q", pairs).tobytes(),
        array("I", [found[pair][0] for pair in pairs]).tobytes(),
        array("I", [found[pair][1] for pair in pairs]).tobytes(),
        array("I", whole).tobytes(),
    )


class SmallTable(msgspec.Struct, frozen=True):
    """Tables with which :class:`gateway.text.small.SmallTokenizer` encodes texts, besides the vocabulary."""

    merges: MergeTable
    expression: str
    """Divides texts into pieces."""
    added_tokens: list[dict[str, Any]]
    """As in ``tokenizer.json``."""
    begin: list[int]
    end: list[int]
    """Special tokens that are added before and after every text."""
    characters_per_token: int | None
    """Most characters that one token represents; None if there is no bound."""


class Merges:
    """Encodes pieces."""

    def __init__(self, table: MergeTable, spelled: Callable[[int], bytes]) -> None:
        """``spelled``: bytes of a token."""
        self._bytes = array("I", table.bytes_)
        self._pairs = array("Q", table.pairs)
        self._ranks = array("I", table.ranks)
        self._merged = array("I", table.merged)
        self._whole = array("I", table.whole)
        self._spelled = spelled

    def encode(self, piece: bytes) -> list[int]:
        """Return the ids of one piece, in time that grows with the square of its length."""
        if self._whole:
            place = bisect_left(self._whole, piece, key=self._spelled)
            if place < len(self._whole) and self._spelled(self._whole[place]) == piece:
                return [self._whole[place]]
        ids = [self._bytes[byte] for byte in piece]
        ranks = [self._rank(left, right) for left, right in pairwise(ids)]
        while ranks and (best := min(ranks)) < _NEVER:
            at = ranks.index(best)
            ids[at : at + 2] = [self._merged[self._place(ids[at], ids[at + 1])]]
            del ranks[at]
            for changed in (at - 1, at):
                if 0 <= changed < len(ranks):
                    ranks[changed] = self._rank(ids[changed], ids[changed + 1])
        return ids

    def _rank(self, left: int, right: int) -> int:
        """Return the rank of a pair; a pair that does not merge has the highest."""
        place = self._place(left, right)
        found = place < len(self._pairs) and self._pairs[place] == left << _SHIFT | right
        return self._ranks[place] if found else _NEVER

    def _place(self, left: int, right: int) -> int:
        """Return where a pair is, or would be."""
        return bisect_left(self._pairs, left << _SHIFT | right)
