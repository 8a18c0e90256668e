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
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be told now, and whether a stop string was met. Nothing may be pushed after it was."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        begin = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """The text held back, now that no more is coming."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop``, which is not in it, begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
