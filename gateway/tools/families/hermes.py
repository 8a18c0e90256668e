"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, once for each call."""

from __future__ import annotations

from gateway.structure.lark import Lark
from gateway.tools.frame import Frame, Function, json_call
from gateway.tools.parser import ToolParser
from gateway.tools.scanner import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LINE = "\n"


class HermesParser(ToolParser):
    """A closing tag that is missing, as at the end of an answer, is tolerated."""

    markers = (OPEN,)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(OPEN)
        yield from scan.space()
        yield from self.json_call()
        yield from scan.space()
        if (yield from scan.begins(CLOSE)):
            self.consume()


class HermesFrame(Frame):
    """The format of Qwen's chat templates."""

    marker = OPEN
    between = LINE

    def call(self, lark: Lark, function: Function) -> str:
        inner = json_call(lark, function, "arguments")
        return f"{lark.literal(LINE)} {inner} {lark.literal(LINE)} {lark.marker(CLOSE)}"
