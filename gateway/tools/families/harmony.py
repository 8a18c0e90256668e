"""gpt-oss (harmony): an answer is a sequence of messages, each with a channel and perhaps a recipient.

``<|channel|>analysis<|message|>THINKING<|end|><|start|>assistant<|channel|>final<|message|>TEXT``; a call is
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>``. The prompt ends with
``<|start|>assistant``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.structure.lark import Lark
from gateway.tools.frame import Frame, Function, arguments
from gateway.tools.parser import MAX_NAME, ToolParser
from gateway.tools.parts import Content, Reasoning
from gateway.tools.scanner import Malformed, Steps, held_for

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ROLE = "assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
_MOST_HEADER = 2 * MAX_NAME
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")

Section = Literal["header", "analysis", "other"]


class HarmonyParser(ToolParser):
    """Also returns the thinking: messages of the channel ``analysis``. Text without a header is content."""

    markers = (CHANNEL,)

    def __init__(
        self,
        functions: Mapping[str, Sequence[str]],
        new_id: Callable[[], str],
        most_calls: int | None = None,
        customs: Collection[str] = (),
    ) -> None:
        self.section: Section = "header"
        """Section of the text that was read last."""
        self._written: list[str] = []
        """Arguments of the current call."""
        super().__init__(functions, new_id, most_calls, customs)

    def _answer(self) -> Steps[None]:
        scan = self.scan
        while not self.done:
            try:
                header = yield from self._header()
            except Malformed:
                self.section = "other"
                yield from self._body(self._content_until, (START,))
            else:
                yield from self._message(header)
            self.section = "header"
            yield from scan.space()
            if scan.ended and not scan.unread:
                return
            if (yield from scan.begins(START)):
                yield from scan.begins(ROLE)

    def _header(self) -> Steps[str]:
        """Read the header of a message. Raises :class:`Malformed` for text that is none."""
        scan = self.scan
        yield from scan.space()
        first = yield from scan.peek()
        if first == "<":
            yield from scan.expect(CHANNEL)
            return CHANNEL + (yield from self._header_end())
        yield from scan.expect("to=")
        return "to=" + (yield from self._header_end())

    def _header_end(self) -> Steps[str]:
        header = yield from self.scan.until(MESSAGE, most=_MOST_HEADER)
        yield from self.scan.expect(MESSAGE)
        return header

    def _message(self, header: str) -> Steps[None]:
        """Read the text of a message and its end."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self.functions:
            self.section = "other"
            self.begin(recipient[1])
            self._written = []
            yield from self._body(self._arguments_until, ENDS)
            if _is_json("".join(self._written)):
                self.end()
            else:
                self.malformed += 1
                self.cut()
            self.done = self.full
        elif recipient is not None:
            self.section = "other"
            self.malformed += 1
            yield from self._body(self._content_until, ENDS)
        elif channel is not None and channel[1] == "analysis":
            self.section = "analysis"
            self.consume()
            yield from self._body(self._reasoning_until, ENDS)
        else:
            self.section = "other"
            self.consume()
            yield from self._body(self._content_until, ENDS)

    def _body(self, pass_on: Callable[[int], None], ends: tuple[str, ...]) -> Steps[None]:
        """Pass text on with ``pass_on`` up to the first of ``ends``, which is read and dropped unless it begins a message."""
        scan = self.scan
        while True:
            found = min((place for end in ends if (place := scan.text.find(end, scan.at)) >= 0), default=-1)
            stop = found if found >= 0 else len(scan.text) if scan.ended else held_for(scan.text, scan.at, ends)
            pass_on(stop)
            if found >= 0:
                end = next(end for end in ends if scan.text.startswith(end, found))
                if end != START:
                    scan.at += len(end)
                    self.consume()
                return
            if scan.ended:
                return
            yield

    def _content_until(self, end: int) -> None:
        self.scan.at = end
        self._pass(Content)

    def _reasoning_until(self, end: int) -> None:
        self.scan.at = end
        self._pass(Reasoning)

    def _arguments_until(self, end: int) -> None:
        text = self.scan.text[self.scan.at : end]
        self.scan.at = end
        self._written.append(text)
        self.arguments(text)

    def _pass(self, kind: type[Content] | type[Reasoning]) -> None:
        text = self.scan.text[self.scan.mark : self.scan.at]
        if text and kind is Reasoning:
            self._parts.append(Reasoning(text))
        elif text and not self.forced:
            self._parts.append(Content(text, self.scan.begin + self.scan.mark))
        self.consume()

    def call(self) -> Steps[None]:
        """Calls are messages, which :meth:`_answer` reads."""
        raise NotImplementedError
        yield


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class HarmonyFrame(Frame):
    """One call, because the model's turn ends with it."""

    marker = CHANNEL
    parallel = False
    text_begin = FINAL

    def call(self, lark: Lark, function: Function) -> str:
        begin = lark.spelled(f"commentary to=functions.{function.name} {CONSTRAIN}json{MESSAGE}")
        return f"{begin} {arguments(lark, function)}"

    def free(self, lark: Lark, calls: str, markers: Sequence[str]) -> str:  # noqa: ARG002 - every message has a header
        """A message of text comes before a call or is the answer."""
        before = lark.text_until("before_calls", END)
        preamble = f"{lark.spelled(f'commentary{MESSAGE}')} {before} {lark.spelled(START + ROLE + CHANNEL)}"
        final = f"{lark.spelled(f'final{MESSAGE}')} {lark.text_without('other', (END,))}"
        return f"{lark.marker(CHANNEL)} (({preamble})? {calls} | {final})"
