"""Patterns of module names in PEFT's ``rank_pattern`` and ``alpha_pattern``, matched without :mod:`re`.

A pattern comes with an adapter, and a regular expression can take exponential time in :mod:`re`, which keeps all threads of the
engine's loop from running. Here a set of positions in the name is one integer, bit ``i`` for position ``i``. Each part of a
pattern maps the positions where it may begin to those where it may end, so no part is tried twice from one position.

The syntax is that of :mod:`re` without back references, look-around, counted repetitions and repeated groups.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_CHARACTERS = 512
MAX_DEPTH = 16
"""Groups within groups."""

_WORD = string.ascii_letters + string.digits + "_"
_CLASSES = {"d": string.digits, "w": _WORD}
_SPECIAL = frozenset(".^$*+?{}[]()|\\")
_ALL = frozenset(map(chr, range(32, 127)))
"""Characters of module names."""
_DOT = frozenset(".")


class PatternError(ValueError):
    """A pattern is not supported. The text goes on after the pattern."""


@dataclass(frozen=True)
class Name:
    """A module name."""

    text: str
    _sets: dict[frozenset[str], int] = field(default_factory=dict)

    def where(self, characters: frozenset[str]) -> int:
        """Return the positions of ``characters``."""
        if (known := self._sets.get(characters)) is not None:
            return known
        found = sum(1 << position for position, character in enumerate(self.text) if character in characters)
        self._sets[characters] = found
        return found


Part = Callable[[Name, int], int]
"""Maps the positions where a part of a pattern may begin to those where it may end."""


class Pattern:
    """A pattern that matches the last parts of a module's name, as PEFT's ``get_pattern_key`` does."""

    def __init__(self, text: str) -> None:
        """Raises :class:`PatternError`."""
        if not 0 < len(text) <= MAX_CHARACTERS:
            raise PatternError(f"has {len(text)} characters, not 1 to {MAX_CHARACTERS}")
        self._part = _Parser(text).parse()
        self._tail = _tail(text)

    def matches(self, name: Name) -> bool:
        """Whether the pattern matches ``name``."""
        if not name.text.endswith(self._tail):
            return False
        begin = 1 | name.where(_DOT) << 1
        return bool(self._part(name, begin) >> len(name.text) & 1)


def _tail(pattern: str) -> str:
    """Return characters that each match ends with. PEFT's EVA writes a pattern for each module, and most of them end here."""
    before = pattern.rstrip(_WORD)
    return "" if "|" in pattern or before.endswith("\\") else pattern[len(before) :]


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Part:
        part = self._alternatives(0)
        if self._at < len(self._text):
            raise PatternError("has a `)` too many")
        return part

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._next
        if not character:
            raise PatternError("ends too early")
        self._at += 1
        return character

    def _skips(self, text: str) -> bool:
        if found := self._text.startswith(text, self._at):
            self._at += len(text)
        return found

    def _alternatives(self, depth: int) -> Part:
        if depth > MAX_DEPTH:
            raise PatternError(f"has more than {MAX_DEPTH} groups within each other")
        parts = [self._sequence(depth)]
        while self._skips("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _either(parts)

    def _sequence(self, depth: int) -> Part:
        parts = []
        while self._next and self._next not in "|)":
            parts.append(self._repeated(depth))
        return _one_after_another(parts)

    def _repeated(self, depth: int) -> Part:
        if self._next == "(":
            part = self._group(depth)
            return _optional(part) if self._repetition("?") else part
        if self._next in "^$":
            part = self._anchor()
            self._repetition("")
            return part
        characters = self._characters()
        how = self._repetition("?*+")
        if how == "?":
            return _optional(_single(characters))
        return _many(characters, least=how == "+") if how else _single(characters)

    def _repetition(self, allowed: str) -> str:
        """Read a sign of repetition; empty if there is none."""
        how = self._next
        if not how or how not in "?*+{":
            return ""
        if how not in allowed:
            raise PatternError("has repetitions that are not supported; name the modules")
        self._at += 1
        if self._next and self._next in "*+{":
            raise PatternError("has repetitions that are not supported; name the modules")
        self._skips("?")  # a lazy repetition matches the same names
        return how

    def _group(self, depth: int) -> Part:
        self._take()
        if self._next == "?" and not self._skips("?:"):
            raise PatternError("has a group that begins with `(?`, which is not supported")
        part = self._alternatives(depth + 1)
        if not self._skips(")"):
            raise PatternError("lacks a `)`")
        return part

    def _anchor(self) -> Part:
        begins = self._take() == "^"
        return lambda name, positions: positions & (1 if begins else 1 << len(name.text))

    def _characters(self) -> frozenset[str]:
        character = self._take()
        if character == ".":
            return _ALL
        if character == "[":
            return self._set()
        if character == "\\":
            return self._escaped()
        if character in _SPECIAL:
            raise PatternError(f"has a {character!r} in a place where it has no meaning")
        return frozenset(character)

    def _escaped(self) -> frozenset[str]:
        character = self._take()
        if character in _CLASSES:
            return frozenset(_CLASSES[character])
        if character.lower() in _CLASSES:
            return _ALL - frozenset(_CLASSES[character.lower()])
        if character.isalnum():
            raise PatternError(f"has \\{character}, which is not supported")
        return frozenset(character)

    def _set(self) -> frozenset[str]:
        """Read a set such as ``[0-9_]`` behind its first bracket."""
        negated = self._skips("^")
        found: frozenset[str] = frozenset()
        while (character := self._take()) != "]" or not found:
            one = self._escaped() if character == "\\" else frozenset(character)
            if self._next == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._take()
                if len(one) > 1 or last == "\\" or last < character:
                    raise PatternError("has a range of characters that is not supported")
                one = frozenset(map(chr, range(ord(character), min(ord(last), 127) + 1)))
            found |= one
        return _ALL - found if negated else found


def _single(characters: frozenset[str]) -> Part:
    return lambda name, positions: (positions & name.where(characters)) << 1


def _many(characters: frozenset[str], *, least: bool) -> Part:
    """Repetition of one of ``characters``. ``least``: at least once. The addition carries a position to the end of the run of
    characters that it is in. Source: R. D. Cameron et al., "Bitwise data parallelism in regular expression matching", PACT 2014."""

    def match(name: Name, positions: int) -> int:
        where = name.where(characters)
        if least:
            positions = (positions & where) << 1
        return (((positions & where) + where) ^ where) | positions

    return match


def _optional(part: Part) -> Part:
    return lambda name, positions: positions | part(name, positions)


def _either(parts: list[Part]) -> Part:
    def match(name: Name, positions: int) -> int:
        ends = 0
        for part in parts:
            ends |= part(name, positions)
        return ends

    return match


def _one_after_another(parts: list[Part]) -> Part:
    def match(name: Name, positions: int) -> int:
        for part in parts:
            if not positions:
                break
            positions = part(name, positions)
        return positions

    return match
