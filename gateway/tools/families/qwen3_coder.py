"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

A value stands between line breaks, which are not part of it. A text is written as it is, everything else as JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gateway.structure.lark import Lark
from gateway.tools.families.tagged import TaggedParser, is_text, text_choices
from gateway.tools.frame import Frame, Function, SchemaError, raw_text
from gateway.tools.parser import MAX_NAME
from gateway.tools.scanner import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LINE = "\n"
FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"

VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
"""Texts that end a value: its closing tag, or if the model forgets it, the next tag on a line of its own."""


class Qwen3CoderParser(TaggedParser):
    """The outer tags may be missing, as this family's models sometimes leave them out."""

    markers = (OPEN, FUNCTION)
    value_ends = VALUE_ENDS

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.begins(OPEN)
        yield from scan.space()
        yield from scan.expect(FUNCTION)
        name = (yield from scan.until(">", most=MAX_NAME)).strip()
        yield from scan.expect(">")
        self.begin(name)
        yield from self._parameters(self.functions[name])
        yield from scan.space()
        if (yield from scan.begins(CLOSE)):
            self.consume()

    def _parameters(self, not_texts: Collection[str]) -> Steps[None]:
        """Read the parameters, and pass them on as the members of a JSON object."""
        scan, before = self.scan, "{"
        while True:
            yield from scan.space()
            if (yield from scan.begins(FUNCTION_END)):
                return self.end_members(before)
            yield from scan.expect(PARAMETER)
            key = (yield from scan.until(">", most=MAX_NAME)).strip()
            yield from scan.expect(">")
            yield from scan.begins(LINE)
            yield from self.member(key, before, not_texts)
            yield from scan.begins(LINE)
            yield from scan.begins(PARAMETER_END)
            self.consume()
            before = ", "


class Qwen3CoderFrame(Frame):
    """Parameters come in the order of the schema. Of a text, only ``enum`` and ``const`` are forced."""

    marker = OPEN
    raw_texts = True
    between = LINE

    def call(self, lark: Lark, function: Function) -> str:
        parameters = " ".join(self._parameter(lark, function, *each) for each in enumerate(function.properties.items()))
        begin = lark.literal(f"\n{FUNCTION}{function.name}>\n")
        return f"{begin} {parameters} {lark.literal(FUNCTION_END + LINE)} {lark.marker(CLOSE)}"

    def _parameter(self, lark: Lark, function: Function, place: int, named: tuple[str, dict[str, Any]]) -> str:
        name, schema = named
        if not name or ">" in name or name != name.strip() or len(name) > MAX_NAME:
            raise SchemaError(f"the parameter {name[:MAX_NAME]!r} cannot be named in a tag")
        begin, end = lark.literal(f"{PARAMETER}{name}>\n"), f"\n{PARAMETER_END}"
        if function.text:
            value = raw_text(lark, function, end, without=VALUE_ENDS[1:])
            return lark.rule(f"parameter_{function.index}_{place}", f"{begin} {value} {lark.literal(LINE)}")
        choices = text_choices(schema, function.schema)
        if not is_text(schema, function.schema):
            value = f"{lark.rule(f'value_{function.index}_{place}', lark.json(schema))} {lark.literal(end)}"
        elif choices:
            value = f"({' | '.join(map(lark.literal, choices))}) {lark.literal(end)}"
        else:
            value = lark.text_until("value", end, without=VALUE_ENDS[1:])
        rule = lark.rule(f"parameter_{function.index}_{place}", f"{begin} {value} {lark.literal(LINE)}")
        return rule if function.requires(name) else f"{rule}?"
