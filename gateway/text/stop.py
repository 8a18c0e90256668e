"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through until one of ``stops`` is complete, and drops it and all that follows.

    Where several could match, the one that is complete first wins (of those, the one that begins first), so the result does
    not depend on how the text is cut into chunks. Only text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ``ValueError`` for an empty stop string, which would match everywhere."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in stops]
        self._begun = [0] * len(stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be told now, and whether a stop string was met. Nothing may be pushed after it was."""
        for place, stop in enumerate(self._stops):
            self._begun[place] = _advanced(stop, self._borders[place], self._begun[place], text)
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        begin = len(text) - max(self._begun, default=0)
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """The text held back, now that no more is coming."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``, the length of its longest proper part that it both begins and ends with (Knuth, Morris and
    Pratt). With them the work is linear in the text, however long and repetitive the stop strings are."""
    borders, length = [0] * len(stop), 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders


def _advanced(stop: str, borders: list[int], begun: int, text: str) -> int:
    """How much of ``stop`` the text ends with, after ``text`` was added to one that ended with ``begun`` characters of it."""
    for char in text:
        while begun and (begun == len(stop) or stop[begun] != char):
            begun = borders[begun - 1]
        begun += stop[begun] == char
    return begun
