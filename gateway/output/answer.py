"""The form of an answer: its thinking section and tool calls, the reader that divides it, and the grammar that forces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from yardstick_llm.gateway.output.families import FAMILIES, Function
from yardstick_llm.gateway.output.lark import Lark, TokenOf
from yardstick_llm.gateway.output.parser import Content, Part, Reasoning, Scanner, Steps, ToolParser, before_space

AUTOMATIC, NO_FORMAT = "auto", "none"
"""Formats that are chosen by the model's chat template, and that are not looked for."""


class Formats(msgspec.Struct, frozen=True):
    """Formats of a model's answers that the settings choose."""

    tool_parser: str = AUTOMATIC
    """Key of :data:`gateway.output.families.FAMILIES`, or one of the above."""
    reasoning_parser: str = AUTOMATIC
    """Key of :data:`gateway.output.answer.THINKING`, or one of the above."""


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
        self.closed = yield from scan.before((close,), self._pass)
        if self.closed:
            scan.at += len(close)
        else:
            scan.at = len(scan.text)
            self._pass(before_space(scan.text, scan.mark, scan.at))

    def _pass(self, end: int) -> None:
        """Pass the section on up to ``end``."""
        self._split.reasoning += self._scan.text[self._scan.mark : end]
        self._scan.mark = end


_CONSTRAINT = "constraint"
_SPACE = r"/[ \n]{0,4}/"


@dataclass(frozen=True)
class Calls:
    """The tool calls of an answer."""

    family: str
    """Key of :data:`~gateway.output.families.FAMILIES`."""
    functions: Sequence[Function]
    """Functions that may be called; at least one."""
    forced: bool
    """Whether the answer consists of calls, or may also be text, or text and then calls."""
    several: bool
    """Whether there may be several."""


def answer_grammar(
    token_of: TokenOf, *, calls: Calls | None = None, constraint: str = "", thinking: Tags | None = None, opened: bool = False
) -> str:
    """Return the grammar of an answer.

    ``constraint``: grammar of an answer without calls; empty for any text. ``thinking``: tags of the section that may come first,
    which the prompt has ``opened`` or not; None if there is none. Raises :class:`~gateway.output.families.SchemaError`.
    """
    lark = Lark(token_of)
    if calls is None:
        answer = lark.embedded(_CONSTRAINT, constraint)
    else:
        frame = FAMILIES[calls.family].frame
        after_marker = frame.calls(lark, calls.functions, several=calls.several)
        whole = after_marker if frame.marker is None else f"{lark.marker(frame.marker)} {after_marker}"
        if calls.forced:
            answer = whole
        elif constraint:
            answer = f"{whole} | {lark.embedded(_CONSTRAINT, constraint)}"
        else:
            answer = frame.free(lark, after_marker, FAMILIES[calls.family].parser.markers)
    return lark.build(_after_thinking(lark, lark.rule("answer", answer), thinking, opened=opened))


def _after_thinking(lark: Lark, answer: str, tags: Tags | None, *, opened: bool) -> str:
    """Match a thinking section, which is optional unless the prompt has ``opened`` it, and then the rule ``answer``."""
    if tags is None:
        return answer
    section = lark.text_until("thinking", tags.close)
    following = lark.rule("AFTER_THINKING", _SPACE)
    return f"{section} {following} {answer}" if opened else f"({lark.spelled(tags.open)} {section} {following})? {answer}"


class Thinking(msgspec.Struct, frozen=True):
    """The thinking section of an answer."""

    format: str
    """Key of :data:`gateway.output.answer.THINKING`."""
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
    """Key of :data:`gateway.output.families.FAMILIES`."""
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
