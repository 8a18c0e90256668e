"""Separates the thinking section of an answer from the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.tools.scanner import Scanner, Steps, before_space, held_for


class Tags(NamedTuple):
    """The texts around a thinking section."""

    open: str
    close: str


THINKING: dict[str, Tags] = {
    "think": Tags("<think>", "</think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "seed": Tags("<seed:think>", "</seed:think>"),
}
"""Formats of thinking sections by name: DeepSeek-R1, Qwen3 and most others; Magistral; Seed-OSS."""


def thinking_of(template: str) -> str | None:
    """Return the name of the format that the chat template ``template`` mentions; None if it mentions none."""
    return next((name for name, tags in THINKING.items() if tags.close in template), None)


def is_open(prompt: str, tags: Tags) -> bool:
    """Whether ``prompt`` ends inside a thinking section, because the chat template has opened it."""
    return prompt.rstrip().endswith(tags.open)


def is_off(prompt: str, tags: Tags) -> bool:
    """Whether ``prompt`` ends behind a thinking section, because the chat template has switched thinking off."""
    return prompt.rstrip().endswith(tags.close)


@dataclass(slots=True)
class Split:
    """The new text of each section."""

    reasoning: str = ""
    content: str = ""


class ThinkingParser:
    """Divides a text that arrives in chunks. A thinking section is only at the beginning of an answer; the whitespace
    around its tags is not part of either text. An answer that ends inside the section is all thinking."""

    def __init__(self, tags: Tags, *, opened: bool) -> None:
        """``opened``: the prompt ends with the opening tag."""
        self.began = opened
        """Whether there is a thinking section."""
        self.closed = False
        """Whether the section has ended."""
        self.ended = False
        """Whether what follows is content."""
        self._tags = tags
        self._scan = Scanner()
        self._split = Split()
        self._steps = self._sections()
        next(self._steps)

    def push(self, text: str) -> Split:
        """Read ``text`` and return what is certain now."""
        self._scan.add(text)
        return self._run()

    def finish(self) -> Split:
        """Return the rest at the end of the answer."""
        self._scan.ended = True
        return self._run()

    def _run(self) -> Split:
        next(self._steps, None)
        split, self._split = self._split, Split()
        return split

    def _sections(self) -> Steps[None]:
        scan = self._scan
        if not self.began:
            yield from scan.space()
            self.began = yield from scan.begins(self._tags.open)
        if self.began:
            scan.mark = scan.at
            yield from self._thinking()
            yield from scan.space()
            scan.mark = scan.at
        self.ended = True
        while True:
            self._split.content += scan.text[scan.mark :]
            scan.mark = scan.at = len(scan.text)
            if scan.ended:
                return
            yield

    def _thinking(self) -> Steps[None]:
        """Pass the section on, up to the closing tag, which is read."""
        scan, close = self._scan, self._tags.close
        yield from scan.space()
        scan.mark = scan.at
        searched = 0
        while True:
            begin = scan.mark + searched
            found = scan.text.find(close, begin)
            end = found if found >= 0 else held_for(scan.text, begin, (close,)) if not scan.ended else len(scan.text)
            certain = before_space(scan.text, scan.mark, end)
            self._split.reasoning += scan.text[scan.mark : certain]
            scan.mark = certain
            if found >= 0 or scan.ended:
                self.closed = found >= 0
                scan.at = found + len(close) if found >= 0 else len(scan.text)
                return
            searched = end - scan.mark
            yield
