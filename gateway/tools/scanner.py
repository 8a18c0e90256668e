"""Reads text that arrives in chunks, with parsers that are written as if all of it were there.

A parser is a generator. It yields where it needs more text and goes on when that has arrived, so the result does not depend on how
the text is divided. Text between :attr:`Scanner.mark` and :attr:`Scanner.at` was read and not passed on: it becomes content if the
call that it seemed to begin turns out to be malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser: yields where it needs more text, and returns a T."""

_NO_SPACE = re.compile(r"[^ \t\r\n]")
_SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_CLOSES = {"}": "{", "]": "["}


class Malformed(Exception):
    """The text is not a call, or it ended inside one."""


class Scanner:
    """A cursor in the text so far."""

    def __init__(self) -> None:
        self.text = ""
        """The text from :attr:`mark` on, or from a little before."""
        self.at = 0
        """Characters of :attr:`text` that were read."""
        self.mark = 0
        """Characters of :attr:`text` that were passed on or consumed."""
        self.begin = 0
        """Characters of the answer before :attr:`text`."""
        self.ended = False
        """Whether no more text will come."""

    def add(self, text: str) -> None:
        """Append a chunk, and forget the text before :attr:`mark`."""
        self.begin += self.mark
        self.text = self.text[self.mark :] + text
        self.at -= self.mark
        self.mark = 0

    @property
    def unread(self) -> bool:
        """Whether there is a next character."""
        return self.at < len(self.text)

    def more(self) -> Steps[None]:
        """Wait for more text. Raises :class:`Malformed` at the end of the text."""
        if self.ended:
            raise Malformed
        yield

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. Raises :class:`Malformed` at the end of the text."""
        while not self.unread:
            yield from self.more()
        return self.text[self.at]

    def space(self) -> Steps[None]:
        """Read whitespace, up to the end of the text."""
        while True:
            found = _NO_SPACE.search(self.text, self.at)
            self.at = found.start() if found else len(self.text)
            if found or self.ended:
                return
            yield

    def begins(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if it comes next, and return whether it did."""
        while len(self.text) - self.at < len(literal) and literal.startswith(self.text[self.at :]) and not self.ended:
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> Steps[None]:
        """Read ``literal``. Raises :class:`Malformed` if it does not come next."""
        if not (yield from self.begins(literal)):
            raise Malformed

    def until(self, *ends: str, most: int) -> Steps[str]:
        """Return the text before the first of ``ends``, which is not read. Raises :class:`Malformed` beyond ``most`` characters."""
        longest = max(map(len, ends))
        searched = 0  # characters from ``at`` on that contain no end
        while True:
            found = [place for end in ends if (place := self.text.find(end, self.at + searched)) >= 0]
            stop = min(found, default=len(self.text) - longest + 1)
            if stop - self.at > most:
                raise Malformed
            if found:
                read = self.text[self.at : stop]
                self.at = stop
                return read
            searched = max(0, len(self.text) - self.at - longest + 1)
            yield from self.more()

    def string(self) -> Steps[str]:
        """Read a JSON string and return its text with the quotes."""
        begin = self.at - self.mark
        yield from self.expect('"')
        yield from self._string_end()
        return self.text[self.mark + begin : self.at]

    def value(self, passed: Callable[[], None]) -> Steps[None]:
        """Read a JSON object or list; brackets and strings are checked, the rest is taken as it is. ``passed`` is called before
        each wait and at the end, and may move :attr:`mark`. Raises :class:`Malformed` where a bracket does not match."""
        opened: list[str] = []
        while True:
            found = _STRUCTURE.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
                passed()
                yield from self.more()
                continue
            self.at = found.start()
            sign = found[0]
            if sign in _CLOSES and (not opened or opened.pop() != _CLOSES[sign]):
                passed()
                raise Malformed
            self.at += 1
            if sign == '"':
                yield from self._string_end(passed)
            elif sign in "{[":
                opened.append(sign)
            if not opened:
                passed()
                return

    def _string_end(self, passed: Callable[[], None] | None = None) -> Steps[None]:
        """Read up to the closing quote, which is read too."""
        while True:
            found = _STRING_STOP.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
            elif found[0] == '"':
                self.at = found.end()
                return
            elif found.end() < len(self.text):
                self.at = found.end() + 1
                continue
            else:
                self.at = found.start()
            if passed is not None:
                passed()
            yield from self.more()


def held_for(text: str, begin: int, markers: tuple[str, ...]) -> int:
    """Return the place in ``text``, from ``begin`` on, of the longest end that may become one of ``markers``."""
    longest = max(map(len, markers))
    for place in range(max(begin, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[place:]) for marker in markers):
            return place
    return len(text)


def before_space(text: str, begin: int, end: int) -> int:
    """Return the end of ``text[begin:end]`` without the whitespace at its end."""
    while end > begin and text[end - 1] in _SPACE:
        end -= 1
    return end
