"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""

from __future__ import annotations

from gateway.structure.lark import Lark
from gateway.tools.frame import Frame, Function, arguments, json_call
from gateway.tools.parser import MAX_NAME, ToolParser
from gateway.tools.scanner import Malformed, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """Reads both formats, whichever the model writes."""

    markers = (OPEN,)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(OPEN)
        yield from scan.space()
        first = yield from scan.peek()
        if first == "[":
            yield from self.calls_in_list(self.json_call)
        elif first == "{":
            yield from self.json_call()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        scan = self.scan
        name = (yield from scan.until("[", "{", most=MAX_NAME)).strip()
        if (yield from scan.begins(ID)):
            yield from scan.until("[", "{", most=MAX_NAME)
        yield from scan.begins(ARGS)
        yield from scan.space()
        if (yield from scan.peek()) != "{":
            raise Malformed
        self.begin(name)
        yield from self.raw_arguments()


class MistralFrame(Frame):
    """The format of a list."""

    marker, listed = OPEN, True
    first, between, last = "[", ", ", "]"

    def call(self, lark: Lark, function: Function) -> str:
        return json_call(lark, function, "arguments")


class MistralNamedFrame(Frame):
    """The format with a marker before the arguments."""

    marker = OPEN

    def call(self, lark: Lark, function: Function) -> str:
        return f"{lark.literal(function.name)} {lark.marker(ARGS)} {arguments(lark, function)}"
