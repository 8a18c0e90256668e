"""GLM-4.5 and later: ``<tool_call>NAME`` and for each parameter ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``, then
``</tool_call>``.

Line breaks between the tags are optional. A text is written as it is, everything else as JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gateway.structure.lark import Lark
from gateway.tools.families.tagged import TaggedParser, is_text, text_choices
from gateway.tools.frame import Frame, Function, SchemaError, raw_text
from gateway.tools.parser import MAX_NAME
from gateway.tools.scanner import Malformed, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
LINE = "\n"


class GlmParser(TaggedParser):
    """A value ends at its closing tag, or where the model forgets that, at the end of the call."""

    markers = (OPEN,)
    value_ends = (VALUE_END, CLOSE)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(OPEN)
        yield from scan.space()
        name = (yield from scan.until(LINE, "<", most=MAX_NAME)).strip()
        if name not in self.functions:
            raise Malformed
        self.begin(name)
        yield from self._parameters(self.functions[name])

    def _parameters(self, not_texts: Collection[str]) -> Steps[None]:
        """Read the parameters, and pass them on as the members of a JSON object."""
        scan, before = self.scan, "{"
        while True:
            yield from scan.space()
            if (yield from scan.begins(CLOSE)):
                return self.end_members(before)
            yield from scan.expect(KEY)
            key = (yield from scan.until(KEY_END, most=MAX_NAME)).strip()
            yield from scan.expect(KEY_END)
            yield from scan.space()
            yield from scan.expect(VALUE)
            yield from self.member(key, before, not_texts)
            yield from scan.begins(VALUE_END)
            self.consume()
            before = ", "


class GlmFrame(Frame):
    """Parameters come in the order of the schema. Of a text, only ``enum`` and ``const`` are forced."""

    marker = OPEN
    raw_texts = True
    between = LINE

    def call(self, lark: Lark, function: Function) -> str:
        parameters = " ".join(self._parameter(lark, function, *each) for each in enumerate(function.properties.items()))
        return f"{lark.literal(function.name + LINE)} {parameters} {lark.marker(CLOSE)}"

    def _parameter(self, lark: Lark, function: Function, place: int, named: tuple[str, dict[str, Any]]) -> str:
        name, schema = named
        if not name or "<" in name or name != name.strip() or len(name) > MAX_NAME:
            raise SchemaError(f"the parameter {name[:MAX_NAME]!r} cannot be named in a tag")
        begin = lark.spelled(f"{KEY}{name}{KEY_END}{LINE}{VALUE}")
        choices = text_choices(schema, function.schema)
        if function.text:
            value = raw_text(lark, function, VALUE_END, without=[CLOSE])
        elif not is_text(schema, function.schema):
            value = f"{lark.rule(f'value_{function.index}_{place}', lark.json(schema))} {lark.marker(VALUE_END)}"
        elif choices:
            value = f"({' | '.join(map(lark.literal, choices))}) {lark.marker(VALUE_END)}"
        else:
            value = lark.text_until("value", VALUE_END, without=[CLOSE])
        rule = lark.rule(f"parameter_{function.index}_{place}", f"{begin} {value} {lark.literal(LINE)}")
        return rule if function.requires(name) else f"{rule}?"
