"""DeepSeek: V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments in a block of Markdown, V3.1 and later
``NAME<｜tool▁sep｜>ARGUMENTS``; each call has tags around it, and all of them together have, too.
"""

from __future__ import annotations

from gateway.structure.lark import Lark
from gateway.tools.frame import Frame, Function, arguments
from gateway.tools.parser import MAX_NAME, ToolParser
from gateway.tools.scanner import Malformed, Steps


def _tag(name: str) -> str:
    """The tags have a fullwidth bar, and U+2581 for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


ALL, ALL_END = _tag("tool calls begin"), _tag("tool calls end")
CALL, CALL_END, SEPARATOR = _tag("tool call begin"), _tag("tool call end"), _tag("tool sep")
BLOCK, BLOCK_END = "```json\n", "\n```"
KIND = "function"


class DeepSeekParser(ToolParser):
    """Reads both formats, whichever the model writes. The tags around all calls may be missing."""

    markers = (ALL, CALL)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.begins(ALL)
        yield from scan.space()
        yield from self._one()
        while not self.full:
            yield from scan.space()
            if (yield from scan.begins(ALL_END)):
                return self.consume()
            if not scan.unread or not scan.text.startswith(CALL[: len(scan.text) - scan.at], scan.at):
                return
            yield from self._one()

    def _one(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(CALL)
        name = (yield from scan.until(SEPARATOR, most=MAX_NAME)).strip()
        yield from scan.expect(SEPARATOR)
        block = name == KIND and (yield from scan.peek()) != "{"
        if block:
            name = (yield from scan.until("\n", most=MAX_NAME)).strip()
            yield from scan.expect("\n")
            yield from scan.expect(BLOCK)
        yield from scan.space()
        if (yield from scan.peek()) != "{":
            raise Malformed
        self.begin(name)
        yield from self.raw_arguments()
        yield from scan.space()
        if block and (yield from scan.begins(BLOCK_END.strip())):
            yield from scan.space()
        if (yield from scan.begins(CALL_END)):
            self.consume()


class DeepSeekBlockFrame(Frame):
    """The format of V3 and R1."""

    marker, listed = ALL, True
    first, between, last = CALL, f"{CALL_END}\n{CALL}", CALL_END + ALL_END

    def call(self, lark: Lark, function: Function) -> str:
        begin = lark.spelled(f"{KIND}{SEPARATOR}{function.name}\n{BLOCK}")
        return f"{begin} {arguments(lark, function)} {lark.literal(BLOCK_END)}"


class DeepSeekFrame(Frame):
    """The format of V3.1 and later."""

    marker, listed = ALL, True
    first, between, last = CALL, CALL_END + CALL, CALL_END + ALL_END

    def call(self, lark: Lark, function: Function) -> str:
        return f"{lark.spelled(function.name + SEPARATOR)} {arguments(lark, function)}"
