"""Encodes common texts piece by piece, several times as fast as the ``tokenizers`` library, with its exact ids.

A byte-level BPE tokeniser first divides a text into pieces (a word with the space before it, a digit, punctuation) and then encodes
each piece by itself. Most pieces of a text are common words. So the text is divided here, by Python's ``re``, and the ids of each
distinct piece come from the library once and are kept.

The ids are exact because the pieces are: the expression is one of those that ``cuts.py`` knows, and the text has only characters
whose properties are the same in all versions of Unicode (:func:`_safe_characters`). Any other text is left to the library: with
combining marks, emoji or newer characters. A piece alone is divided into itself, because no alternative looks
behind, and at the end of a text the lookahead of whitespace holds.

All tenants share the kept pieces, as they share the library's own cache. Only single words are kept, never texts, so the time of a
request can tell at most that somebody has used a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import chain
from typing import Any

from gateway.text.alternatives import any_of

MAX_PIECES = 1 << 15
"""Most pieces that are kept, of some 300 bytes each. English prose of 400 kB has 6,000."""
MAX_PIECE_CHARACTERS = 32
"""Longest piece that is kept."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Expression of the library's ``ByteLevel`` pre-tokeniser."""

_BLOCKS = [range(0x0250), range(0x0370, 0x0530), range(0x2000, 0x2600), range(0x3040, 0x3100), range(0x4E00, 0x9FA6)]
"""Latin, Greek, Cyrillic, punctuation and symbols, Japanese syllables, Chinese characters."""
_CLASSES = re.compile(r"\\p\{(\w+)\}|\\([sS])")


class Pieces:
    """The pieces of one tokeniser whose ids are known. Not safe to use from several threads."""

    def __init__(
        self,
        expression: str,
        added_tokens: Iterable[str],
        encode: Callable[[list[str]], list[list[int]]],
        dividing: Mapping[str, int] | None = None,
    ) -> None:
        """``encode``: returns the library's ids of each of several texts. ``dividing``: ids of the added tokens, if the library
        divides texts at them before all else."""
        self._dividing = dividing or {}
        self._findall = re.compile(_translated(expression)).findall
        self._added = any_of(added_tokens)
        self._unsafe = _unsafe()
        self._encode = encode
        self._ids: dict[str, tuple[int, ...]] = {}  # the garbage collector skips tuples of integers, and this dictionary

    def encode(self, text: str, *, parses: bool = False) -> list[int] | None:
        """Return the ids of ``text``; None if the library must encode it. ``parses``: added tokens in it are tokens."""
        match = self._added.search(text)
        if match is None:
            return self._encode_text(text)
        ids: list[int] = []
        start = 0
        while match is not None:
            id, before = self._dividing.get(match[0]) if parses else None, self._encode_text(text[start : match.start()])
            if id is None or before is None:
                return None
            ids += before
            ids.append(id)
            start = match.end()
            match = self._added.search(text, start)
        rest = self._encode_text(text[start:])
        return None if rest is None else ids + rest

    def _encode_text(self, text: str) -> list[int] | None:
        """Return the ids of a text without added tokens; None if the library must encode it."""
        if not text.isascii() and self._unsafe.search(text):
            return None
        pieces: list[str] = self._findall(text)
        if len("".join(pieces)) != len(text):
            return None
        known = self._ids
        if new := [piece for piece in pieces if piece not in known]:
            new = list(set(new))
            encoded = dict(zip(new, map(tuple, self._encode(new)), strict=True))
            known |= encoded
            ids = list(chain.from_iterable(map(known.__getitem__, pieces)))
            self._forget(encoded)
            return ids
        return list(chain.from_iterable(map(known.__getitem__, pieces)))

    def _forget(self, encoded: dict[str, tuple[int, ...]]) -> None:
        """Forget the long ones of pieces that were just added, and the earlier pieces if there are too many."""
        for piece in encoded:
            if len(piece) > MAX_PIECE_CHARACTERS:
                del self._ids[piece]
        if len(self._ids) > MAX_PIECES:
            latest = [piece for piece in encoded if piece in self._ids][:MAX_PIECES]
            kept = {piece: encoded[piece] for piece in latest}
            self._ids.clear()
            self._ids |= kept


def expression_of(document: dict[str, Any]) -> str | None:
    """Return the expression that divides texts in a ``tokenizer.json`` which has safe cuts; None if more than one step divides."""
    pre_tokenizer = document["pre_tokenizer"]
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return GPT2
    return str(steps[0]["pattern"]["Regex"]) if kinds == ["Split", "ByteLevel"] else None


@cache
def _safe_characters() -> list[str]:
    """Return the characters of :data:`_BLOCKS` that every version of Unicode since 3.2 classifies alike, that NFC keeps and
    composes with nothing, and that are no other case of an ASCII letter."""
    old = unicodedata.ucd_3_2_0
    chars = [chr(code) for block in _BLOCKS for code in block]
    return [char for char in chars if old.category(char) == unicodedata.category(char) and _is_safe(char)]


def _is_safe(char: str) -> bool:
    if unicodedata.category(char)[0] in "MC" and not char.isascii():
        return False
    folded = {char.lower(), char.upper(), char.casefold()}
    return char.isascii() or (unicodedata.normalize("NFC", char) == char and not any(map(str.isascii, folded)))


@cache
def _unsafe() -> re.Pattern[str]:
    return re.compile(f"[^{_ranges(_safe_characters())}]")


@cache
def _members(name: str) -> str:
    """Return the members of a class of characters, as they are written inside brackets. ``name``: as in ``\\p{L}``, or ``s``."""
    if name == "s":
        return _ranges([char for char in _safe_characters() if char.isspace() and char not in "\x1c\x1d\x1e\x1f"])
    return _ranges([char for char in _safe_characters() if unicodedata.category(char).startswith(name)])


def _ranges(chars: list[str]) -> str:
    """Return ascending characters as ranges of a class."""
    ranges: list[list[int]] = []
    for code in map(ord, chars):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _translated(expression: str) -> str:
    """Return an expression of ``cuts.py`` for Python's ``re``, which has no ``\\p{...}`` and another ``\\s``."""
    parts, start, inside = [], 0, False
    for match in _CLASSES.finditer(expression):
        before = expression[start : match.start()]
        inside = _is_inside(before, inside)
        parts += [before, _written(match, inside=inside)]
        start = match.end()
    return "".join([*parts, expression[start:]])


def _is_inside(text: str, inside: bool) -> bool:
    """Whether brackets are open behind ``text``."""
    opened, closed = text.rfind("["), text.rfind("]")
    return inside if opened == closed else opened > closed


def _written(match: re.Match[str], *, inside: bool) -> str:
    name = match[1] or match[2]
    if inside:
        assert name != "S", "no known expression has this inside brackets"
        return _members(name) or ""
    members = _members(name.lower() if name == "S" else name)
    return f"[{'^' * (name == 'S')}{members}]" if members else "(?!)"
