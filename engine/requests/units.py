"""Target lengths in words, sentences and characters: what a sequence has written so far, and the tokens that the rest takes.

Tokens of a unit are assumed, or those of the answers that the length model was calibrated on. The prompt and what the sequence
itself writes correct them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yardstick_llm.engine import wire


class Usual(NamedTuple):
    """The assumed length of a unit, used before a text shows its own."""

    tokens: float
    """Tokens of one unit, in English and with a vocabulary of 32,000 tokens or more."""
    weight: float
    """Units of text that count as much as this assumption."""


USUAL: dict[wire.LengthUnit, Usual] = {
    "tokens": Usual(1, 1),
    "words": Usual(1.35, 20),
    "sentences": Usual(22, 2),
    "characters": Usual(0.23, 100),
}
PROMPT_TOKENS = 512
"""Last tokens of a prompt that tell how long its units are."""
BEGUN = 0.95
"""Most that an unfinished unit counts."""

LEAST_UNITS = 20
"""Fewest units that tell how many tokens one has."""

_QUOTES = b"\"')]"
_SENTENCE = re.compile(rb"[.!?]+[\"')\]]*(?=\s)|" + b"|".join(mark.encode() for mark in "。！？"))
_END = re.compile(rb"[.!?]+[\"')\]]*$")


class Written:
    """The units of a text, counted as tokens come.

    Words are separated by ASCII whitespace; sentences end with one of ``. ! ?`` before whitespace, or with one of ``。！？``.
    """

    def __init__(
        self,
        unit: wire.LengthUnit,
        prompt: Iterable[int] = (),
        spellings: Sequence[bytes] = (),
        measured: Mapping[wire.LengthUnit, float] | None = None,
    ) -> None:
        """``spellings``: of each token; control tokens have none, and count as nothing. ``measured``: tokens of a unit, in place of
        :data:`USUAL`."""
        self.unit = unit
        self.read = 0
        """Tokens that were counted, control tokens included."""
        self.units = 0
        """Complete units."""
        self.unfinished = 0
        """Tokens of the unit that is not complete."""
        self._tokens = 0
        self._open = False
        """words: the text ends inside a word. sentences: the text ends with a mark that ends a sentence if a space follows."""
        self._usual = (measured or {}).get(unit, USUAL[unit].tokens)
        if prompt:
            before = Written(unit, measured=measured)
            before.add(prompt, spellings)
            self._usual = before.tokens_of_unit

    @property
    def tokens_of_unit(self) -> float:
        """Tokens of one unit, by this text and what was assumed before."""
        weight = USUAL[self.unit].weight
        return (weight * self._usual + self.complete) / (weight + self.units)

    @property
    def complete(self) -> int:
        """Tokens of the complete units."""
        return self._tokens - self.unfinished

    @property
    def done(self) -> float:
        """Units so far, the unfinished one in part."""
        if self.unit == "sentences" and self._open:
            return self.units + 1.0
        return self.units + (min(BEGUN, self.unfinished / self.tokens_of_unit) if self.unfinished else 0.0)

    def left(self, units: int) -> float:
        """Return the tokens that a text of ``units`` still takes; below 0 in a longer text."""
        return (units - self.done) * self.tokens_of_unit

    def add(self, tokens: Iterable[int], spellings: Sequence[bytes]) -> None:
        """Count further tokens."""
        for token in tokens:
            self.read += 1
            if spelling := spellings[token]:
                self._tokens += 1
                self._count(spelling)

    def _count(self, spelling: bytes) -> None:
        if self.unit == "characters":
            self.units += sum(byte & 0xC0 != 0x80 for byte in spelling)  # bytes that begin one in UTF-8
        elif self.unit == "words":
            pieces, goes_on = len(spelling.split()), self._open and not spelling[:1].isspace()
            begun = pieces - goes_on
            was_open, self._open = self._open, not spelling[-1:].isspace()
            self.units += was_open + begun - self._open
            self.unfinished = 0 if not self._open else 1 if begun else self.unfinished + 1
        else:
            ended = len(_SENTENCE.findall(spelling)) + (self._open and spelling[:1].isspace())
            self.units += ended
            self.unfinished = 1 if ended else self.unfinished + 1
            self._open = _END.search(spelling) is not None or (self._open and not spelling.strip(_QUOTES))


def measure(texts: Sequence[Sequence[int]], spellings: Sequence[bytes]) -> dict[wire.LengthUnit, float]:
    """Return the tokens of a unit in ``texts``, of each unit of which these have at least :data:`LEAST_UNITS`."""
    found: dict[wire.LengthUnit, float] = {}
    for unit in USUAL:
        counts = [Written(unit) for _ in texts]
        for written, text in zip(counts, texts, strict=True):
            written.add(text, spellings)
        units = sum(written.units for written in counts)
        if unit != "tokens" and units >= LEAST_UNITS:
            found[unit] = sum(written.complete for written in counts) / units
    return found
