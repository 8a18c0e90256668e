"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

A value stands between line breaks, which are not part of it. A text is written as it is, everything else as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import msgspec

from gateway.tools.parser import MAX_NAME, ToolParser
from gateway.tools.scanner import Scanner, Steps, held_for

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"

VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
"""What ends a value: its closing tag, or where the model forgets that, the next tag on a line of its own."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}


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
                return self.arguments("{}" if before == "{" else "}")
            yield from scan.expect(PARAMETER)
            key = (yield from scan.until(">", most=MAX_NAME)).strip()
            yield from scan.expect(">")
            self.arguments(f"{before}{_quoted(key)}: ")
            if key in not_texts:
                yield from self._other_value()
            else:
                yield from self._text_value()
            before = ", "

    def _text_value(self) -> Steps[None]:
        """Read a text, and pass it on as a JSON string while it arrives."""
        scan, ended = self.scan, False
        yield from scan.begins("\n")
        self.arguments('"')
        while not ended:
            end, ended = _value_end(scan, scan.at)
            text = scan.text[scan.at : end]
            scan.at = end
            self.arguments(_quoted(text)[1:-1])
            if not ended:
                yield from scan.more()
        self.arguments('"')
        yield from self._value_closed()

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
        yield from self._value_closed()

    def _value_closed(self) -> Steps[None]:
        yield from self.scan.begins("\n")
        yield from self.scan.begins(PARAMETER_END)
        self.consume()


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


