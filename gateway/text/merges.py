"""Byte-level BPE in compact tables, so that the gateway's process can tokenise words without the ``tokenizers`` library.

The library reads a ``tokenizer.json`` for seconds while it holds the interpreter's lock. These tables are bytes, which a worker's
parent makes and which need no reading. They serve single pieces (``pieces.py``). A word that is one token takes about 1 µs, another
one 2 to 8 µs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from zlib import crc32

import msgspec

from gateway.text.spelling import BYTE_OF

_SHIFT = 32
_LOW = (1 << _SHIFT) - 1
_NEVER = 1 << 2 * _SHIFT
"""Follows every merge of :class:`_Pairs`: the pair does not merge."""
_FREE = _LOW
"""Marks a place of :attr:`MergeTable.words` without a token."""
MAX_PAIRS = 1 << 14
"""Most pairs of tokens that are kept beside the tables, of some 170 bytes each."""
_BATCH = 1 << 12
"""Tokens that are encoded at a time to find those that are words."""


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
    words: bytes
    """The tokens that a piece with their bytes becomes, as uint32: a hash table by the CRC-32 of the bytes, with linear probing.
    Its length is a power of 2, and at most half of it is in use."""


def merge_table(
    document: dict[str, Any], spelled: Callable[[int], bytes], encode: Callable[[list[str]], list[list[int]]]
) -> MergeTable:
    """Return the merges of a ``tokenizer.json`` that has safe cuts (``cuts.py``). ``spelled``: bytes of a token. ``encode``: the
    library's ids of each of several texts."""
    model = document["model"]
    vocab: dict[str, int] = model["vocab"]
    found: dict[int, tuple[int, int]] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        found[vocab[left] << _SHIFT | vocab[right]] = (rank, vocab[left + right])  # of equal pairs, the library keeps the last
    pairs = sorted(found)
    added = {token["id"] for token in document.get("added_tokens") or []}
    words = vocab.values() if model.get("ignore_merges") else _words(sorted({*vocab.values()} - added), spelled, encode)
    of_bytes = {byte: vocab[char] for char, byte in BYTE_OF.items()}
    return MergeTable(
        array("I", [of_bytes[byte] for byte in range(256)]).tobytes(),
        array("Q", pairs).tobytes(),
        array("I", [found[pair][0] for pair in pairs]).tobytes(),
        array("I", [found[pair][1] for pair in pairs]).tobytes(),
        _hashed([(id, spelled(id)) for id in words]).tobytes(),
    )


def _words(ids: list[int], spelled: Callable[[int], bytes], encode: Callable[[list[str]], list[list[int]]]) -> list[int]:
    """Return the tokens that the library makes of their own bytes, which are then one piece: each piece has a token of its own.
    ``ids``: without added tokens, which divide texts before all else."""
    words: list[int] = []
    for begin in range(0, len(ids), _BATCH):
        texts = {id: text for id in ids[begin : begin + _BATCH] if (text := _text(spelled(id)))}
        words += [id for id, encoded in zip(texts, encode([*texts.values()]), strict=True) if encoded == [id]]
    return words


def _text(spelling: bytes) -> str | None:
    """Return the text of a token; None for a part of a character, which no piece consists of."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None


def _hashed(words: list[tuple[int, bytes]]) -> array[int]:
    """Return :attr:`MergeTable.words` with the given tokens and their bytes."""
    table = array("I", [_FREE]) * (1 << (2 * len(words)).bit_length())
    for id, spelling in words:
        place = crc32(spelling) % len(table)
        while table[place] != _FREE:
            place = (place + 1) % len(table)
        table[place] = id
    return table


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
        self._pairs = _Pairs(table)
        self._words = array("I", table.words)
        self._last = len(self._words) - 1
        self._spelled = spelled

    def encode(self, piece: bytes) -> list[int]:
        """Return the ids of one piece, in time that grows with the square of its length."""
        if (word := self._word(piece)) is not None:
            return [word]
        merge_of = self._pairs.__getitem__
        ids = [*map(self._bytes.__getitem__, piece)]
        merges = [*map(merge_of, pairwise(ids))]
        while merges and (first := min(merges)) != _NEVER:
            at = merges.index(first)
            ids[at : at + 2] = [first & _LOW]
            del merges[at]
            if at:
                merges[at - 1] = merge_of((ids[at - 1], ids[at]))
            if at < len(merges):
                merges[at] = merge_of((ids[at], ids[at + 1]))
        return ids

    def _word(self, piece: bytes) -> int | None:
        """Return the token that a piece is; None if its merges decide."""
        place = crc32(piece) & self._last
        while (id := self._words[place]) != _FREE:
            if self._spelled(id) == piece:
                return id
            place = (place + 1) & self._last
        return None


class _Pairs(dict[tuple[int, int], int]):
    """For each pair of tokens: the rank of its merge times 2**32, plus the token that it becomes. The pair with the least value
    merges first. Finding a pair in the tables takes several times as long, so pairs are kept here."""

    def __init__(self, table: MergeTable) -> None:
        self._pairs = array("Q", table.pairs)
        self._ranks = array("I", table.ranks)
        self._merged = array("I", table.merged)

    def __missing__(self, pair: tuple[int, int]) -> int:
        key = pair[0] << _SHIFT | pair[1]
        place = bisect_left(self._pairs, key)
        merges = place < len(self._pairs) and self._pairs[place] == key
        if len(self) >= MAX_PAIRS:
            self.clear()
        self[pair] = found = self._ranks[place] << _SHIFT | self._merged[place] if merges else _NEVER
        return found
