"""The form of an answer, decided from the request and the rendered prompt, and the reader that divides the answer by it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.tools.families.registry import FAMILIES
from gateway.tools.parser import ToolParser
from gateway.tools.parts import Content, Part, Reasoning
from gateway.tools.thinking import THINKING, Split, ThinkingParser


class Thinking(msgspec.Struct, frozen=True):
    """The thinking section of an answer."""

    format: str
    """Key of :data:`gateway.tools.thinking.THINKING`."""
    opened: bool
    """Whether the prompt ends inside the section."""
    open_id: int | None
    close_id: int | None
    """The tags' token ids; None for a tag that is several tokens."""
    shown: bool = True
    """Whether the client gets the section."""


class Tools(msgspec.Struct, frozen=True):
    """The tools that an answer may call."""

    family: str
    """Key of :data:`gateway.tools.families.registry.FAMILIES`."""
    functions: dict[str, list[str]]
    """Names of the tools, each with its parameters that are not texts."""
    most_calls: int | None = None
    customs: list[str] = []
    """Names of the custom tools."""
    forced: bool = False
    """Whether the answer consists of calls."""


class AnswerFormat(msgspec.Struct, frozen=True):
    """How the text of an answer is divided into parts."""

    tools: Tools | None = None
    thinking: Thinking | None = None
    shown: list[int] = []
    """Special tokens that are part of the format, so their text must be seen."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the end of the thinking section can be told from token ids."""
        return self.thinking is None or self.thinking.close_id is not None


class AnswerReader:
    """Divides the text of one answer into parts, and counts the tokens of its thinking section."""

    def __init__(self, format: AnswerFormat) -> None:
        self._read = 0
        """Characters of the answer so far."""
        self.reasoning_tokens = 0
        """Tokens of the thinking section, with its tags."""
        thinking, tools = format.thinking, format.tools
        self._close_id = thinking.close_id if thinking else None
        self._shows = thinking is None or thinking.shown
        self._thinking: ThinkingParser | None = None
        self._tools: ToolParser | None = None
        self._begun = False
        """Whether the parser of tools has text."""
        if thinking is not None:
            self._thinking = ThinkingParser(THINKING[thinking.format], opened=thinking.opened)
        if tools is not None:
            family = FAMILIES[tools.family]
            self._tools = family.parser(tools.functions, family.new_id, tools.most_calls, tools.customs)
            self._tools.forced = tools.forced

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._tools.calls if self._tools else 0

    @property
    def complete_calls(self) -> int:
        """Tool calls so far; 0 if the arguments of one of them are not complete."""
        return self.calls if self._tools and self._tools.complete == self.calls else 0

    @property
    def malformed(self) -> int:
        """Tool calls so far that broke off, or were passed on as text."""
        return self._tools.malformed if self._tools else 0

    @property
    def done(self) -> bool:
        """Whether the answer has all tool calls that it may have, so nothing more is wanted."""
        return self._tools is not None and self._tools.done

    def push(self, text: str, tokens: Sequence[int]) -> list[Part]:
        """Read ``text``, which ``tokens`` have added, and return the parts that are certain now."""
        self._read += len(text)
        thinking = self._thinking
        if thinking is None or thinking.ended:
            return self._content(text)
        counted = thinking.closed
        split = thinking.push(text)
        if thinking.began and not counted:
            close = self._close_id
            if thinking.closed and close is not None and close in tokens:
                tokens = tokens[: tokens.index(close) + 1]
            self.reasoning_tokens += len(tokens)
        return self._parts(split)

    def finish(self) -> list[Part]:
        """Return the rest at the end of the answer."""
        parts: list[Part] = []
        if self._thinking is not None:
            parts = self._parts(self._thinking.finish())
        return parts + self._tools.finish() if self._tools else parts

    def _parts(self, split: Split) -> list[Part]:
        parts: list[Part] = [Reasoning(split.reasoning)] if split.reasoning and self._shows else []
        return parts + self._content(split.content) if split.content else parts

    def _content(self, text: str) -> list[Part]:
        begin = self._read - len(text)
        if self._tools is None:
            return [Content(text, begin)] if text else []
        if not self._begun:
            self._begun, self._tools.scan.begin = True, begin
        return self._tools.push(text)
