"""Llama 3.1 to 3.3: ``{"name": …, "parameters": {…}}`` as the whole answer or after ``<|python_tag|>``, separated by ``;``."""

from __future__ import annotations

from gateway.structure.lark import Lark
from gateway.tools.frame import Frame, Function, json_call
from gateway.tools.parser import ToolParser
from gateway.tools.scanner import Steps

TAG = "<|python_tag|>"


class LlamaJsonParser(ToolParser):
    """Without the tag, only the beginning of an answer is a call; elsewhere, JSON is text."""

    markers = (TAG,)

    def opening(self) -> Steps[None]:
        scan = self.scan
        yield from scan.space()
        if scan.unread and scan.text[scan.at] == "{":
            yield from self._calls()

    def call(self) -> Steps[None]:
        yield from self.scan.expect(TAG)
        yield from self.scan.space()
        yield from self._calls()

    def _calls(self) -> Steps[None]:
        scan = self.scan
        while True:
            yield from self.json_call()
            if self.full:
                return
            yield from scan.space()
            if not (yield from scan.begins(";")):
                return
            yield from scan.space()
            yield from scan.begins(TAG)
            yield from scan.space()
            if not scan.unread:
                return self.consume()


class LlamaJsonFrame(Frame):
    """Calls without the tag, which introduces built-in tools."""

    between = "; "

    def call(self, lark: Lark, function: Function) -> str:
        return json_call(lark, function, "parameters")
