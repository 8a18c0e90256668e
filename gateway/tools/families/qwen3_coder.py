"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

A value stands between line breaks, which are not part of it. A text is written as it is, everything else as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec

from gateway.structure.lark import Lark
from gateway.structure.schema import resolved
from gateway.tools.frame import Frame, Function, SchemaError, listed, raw_text
from gateway.tools.parser import MAX_NAME, ToolParser
from gateway.tools.scanner import Scanner, Steps, held_for

MAX_DEPTH = 8
_PYTHON = {"True": "true", "False": "false", "None": "null"}

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LINE = "\n"
FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"

VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
"""Texts that end a value: its closing tag, or if the model forgets it, the next tag on a line of its own."""


class Qwen3CoderParser(ToolParser):
    """The outer tags may be missing, as this family's models sometimes leave them out."""

    markers = (OPEN, FUNCTION)

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
            yield from self._member(key, before, not_texts)
            yield from scan.begins(LINE)
            yield from scan.begins(PARAMETER_END)
            self.consume()
            before = ", "

    def _member(self, key: str, before: str, not_texts: Collection[str]) -> Steps[None]:
        """Read the value of ``key``, up to its end, and pass both on behind ``before``."""
        self.arguments(f"{before}{_quoted(key)}: ")
        if key in not_texts:
            yield from self._other_value()
        else:
            yield from self._text_value()

    def _text_value(self) -> Steps[None]:
        """Read a text, and pass it on as a JSON string while it arrives."""
        scan, ended = self.scan, False
        self.arguments('"')
        while not ended:
            end, ended = _value_end(scan, scan.at)
            text = scan.text[scan.at : end]
            scan.at = end
            self.arguments(_quoted(text)[1:-1])
            if not ended:
                yield from scan.more()
        self.arguments('"')

    def _other_value(self) -> Steps[None]:
        """Read a value that is no text, and pass it on as JSON."""
        scan, ended = self.scan, False
        searched = 0
        while not ended:
            end, ended = _value_end(scan, scan.at + searched)
            searched = end - scan.at
            if not ended:
                yield from scan.more()
        text = scan.text[scan.at : scan.at + searched].strip()
        scan.at += searched
        self.arguments(_as_json(text))


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


def _value_end(scan: Scanner, begin: int) -> tuple[int, bool]:
    """Return the end of the value's text that is certain, searching from ``begin`` on, and whether the value ends there."""
    found = min((place for end in VALUE_ENDS if (place := scan.text.find(end, begin)) >= 0), default=-1)
    if found >= 0:
        return found, True
    return (len(scan.text) if scan.ended else held_for(scan.text, begin, VALUE_ENDS)), False


def _as_json(text: str) -> str:
    """Return ``text``, if it is JSON or one of Python's words for it, and otherwise a JSON string with it."""
    text = _PYTHON.get(text, text)
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _quoted(text)
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_text(schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> bool:
    """Whether a parameter with ``schema`` is written as a text: if a text is one of its types, or it states no type.

    ``root``: the schema of all arguments, to which references lead. It comes from a client and need not be a valid one;
    alternatives within alternatives are followed to :data:`MAX_DEPTH`.
    """
    schema = resolved(root, schema)
    kind = schema.get("type")
    if kind is not None:
        return kind == "string" or "string" in listed(schema, "type")
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in listed(schema, name) if isinstance(part, dict)]
    if parts:
        return depth < MAX_DEPTH and any(is_text(part, root, depth + 1) for part in parts)
    values = _values(schema)
    return any(isinstance(value, str) for value in values) if values else "$ref" not in schema


def text_choices(schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> list[str]:
    """Return the texts that a parameter for which :func:`is_text` holds may have; none if there may be others."""
    schema = resolved(root, schema)
    if values := _values(schema):
        return [value for value in values if isinstance(value, str)]
    for name in ("anyOf", "oneOf", "allOf") if depth < MAX_DEPTH else ():
        parts = [part for part in listed(schema, name) if isinstance(part, dict) and is_text(part, root, depth + 1)]
        found = [text_choices(part, root, depth + 1) for part in parts]
        if found and (all(found) or (name == "allOf" and any(found))):
            return next(filter(None, found)) if name == "allOf" else [text for texts in found for text in texts]
    return []


def _values(schema: dict[str, Any]) -> list[Any]:
    return [*listed(schema, "enum"), *([schema["const"]] if "const" in schema else ())]
