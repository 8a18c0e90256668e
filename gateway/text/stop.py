"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of ``stops`` is complete, and drops that stop string and all that follows.

    If several could match, the one that is complete first wins (of those, the one that begins first), so the result does not depend
    on the division of the text into chunks. Only text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ``ValueError`` for an empty stop string, which would match everywhere."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in stops]
        self._begun = [0] * len(stops)  # number of characters of each stop string that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string is complete. Push nothing after that."""
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
        """Return the held-back text at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of ``stop``, the length of its longest proper prefix that is also its suffix (Knuth, Morris and
    Pratt). With these the work is linear in the text, however long and repetitive the stop strings are."""
    borders, length = [0] * len(stop), 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders


def _advanced(stop: str, borders: list[int], begun: int, text: str) -> int:
    """Return the number of characters of ``stop`` that the text ends with, after ``text``; ``begun`` is the number before."""
    for char in text:
        while begun and (begun == len(stop) or stop[begun] != char):
            begun = borders[begun - 1]
        begun += stop[begun] == char
    return begun
