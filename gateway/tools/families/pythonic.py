"""Llama 3.2 and 4: ``[f(a=1), g(b="x")]``, calls in Python's syntax, as the whole answer or after ``<|python_start|>``."""

from __future__ import annotations

import json
import re
from keyword import iskeyword
from string import hexdigits

from gateway.structure.lark import Lark
from gateway.tools.frame import Frame, Function, SchemaError, json_text
from gateway.tools.parser import MAX_NAME, ToolParser
from gateway.tools.scanner import Malformed, Steps

START, END = "<|python_start|>", "<|python_end|>"

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN_END = re.compile(r"[ \t\r\n,:()\[\]{}'\"=]")
_STRING_STOP = re.compile(r"['\"\\]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_OPENS = {"[": ("]", "["), "(": (")", "["), "{": ("}", "{")}
"""Opening bracket in Python: its closing bracket, and the bracket in JSON."""
_JSON_CLOSE = {"]": "]", ")": "]", "}": "}"}


class PythonicParser(ToolParser):
    """Values are Python literals; the words of JSON (``true``, ``null``) are accepted too."""

    markers = (START,)

    def opening(self) -> Steps[None]:
        scan = self.scan
        yield from scan.space()
        if scan.unread and scan.text[scan.at] == "[":
            yield from self.calls_in_list(self._call)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(START)
        yield from scan.space()
        yield from self.calls_in_list(self._call)
        yield from scan.space()
        if (yield from scan.begins(END)):
            self.consume()

    def _call(self) -> Steps[None]:
        name = (yield from self.scan.until("(", most=MAX_NAME)).strip()
        yield from self.scan.expect("(")
        self.begin(name)
        yield from self._arguments()

    def _arguments(self) -> Steps[None]:
        """Read ``a=1, b="x")``, and pass it on as a JSON object."""
        scan, before = self.scan, "{"
        while True:
            yield from scan.space()
            if (yield from scan.begins(")")):
                return self.end_members(before)
            key = (yield from scan.until("=", ")", most=MAX_NAME)).strip()
            if not key.isidentifier():
                raise Malformed
            yield from scan.expect("=")
            self.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value()
            before = ", "
            yield from scan.space()
            if (yield from scan.peek()) != ")":
                yield from scan.expect(",")

    def _value(self) -> Steps[None]:
        """Read a Python literal, and pass it on as JSON while it arrives."""
        scan = self.scan
        opened: list[str] = []
        comma = False  # a comma was read and not passed on, because Python allows one before a closing bracket
        while True:
            yield from scan.space()
            sign = yield from scan.peek()
            if opened and sign == opened[-1]:
                yield from scan.expect(sign)
                self.arguments(_JSON_CLOSE[opened.pop()])
            else:
                if comma:
                    self.arguments(", ")
                if sign in _OPENS:
                    yield from scan.expect(sign)
                    close, json_open = _OPENS[sign]
                    opened.append(close)
                    self.arguments(json_open)
                    comma = False
                    continue
                yield from self._scalar(sign)
            comma = False
            if not opened:
                return
            yield from scan.space()
            sign = yield from scan.peek()
            if sign == ":" and opened[-1] == "}":
                yield from scan.expect(":")
                self.arguments(": ")
            elif sign != opened[-1]:
                yield from scan.expect(",")
                comma = True

    def _scalar(self, first: str) -> Steps[None]:
        """Read a string, a number or a word."""
        if first in "'\"":
            yield from self._string(first)
            return
        scan = self.scan
        end = scan.at - scan.mark
        while (found := _PLAIN_END.search(scan.text, scan.mark + end)) is None:
            end = len(scan.text) - scan.mark
            if len(scan.text) - scan.at > MAX_NAME:
                raise Malformed
            yield from scan.more()
        word = scan.text[scan.at : found.start()]
        if len(word) > MAX_NAME or not (word in _WORDS or _NUMBER.fullmatch(word)):
            raise Malformed
        scan.at = found.start()
        self.arguments(_WORDS.get(word, word))

    def _string(self, quote: str) -> Steps[None]:
        """Read a string in ``quote``, and pass it on as a JSON string while it arrives."""
        scan = self.scan
        yield from scan.expect(quote)
        self.arguments('"')
        while True:
            found = _STRING_STOP.search(scan.text, scan.at)
            begin, scan.at = scan.at, found.start() if found else len(scan.text)
            self.arguments(json.dumps(scan.text[begin : scan.at], ensure_ascii=False)[1:-1])
            if found is None:
                yield from scan.more()
            elif found[0] == "\\":
                yield from self._escape()
            else:
                yield from scan.expect(found[0])
                if found[0] == quote:
                    return self.arguments('"')
                self.arguments(json.dumps(found[0])[1:-1])

    def _escape(self) -> Steps[None]:
        """Read an escape sequence, and pass its character on."""
        scan = self.scan
        yield from scan.expect("\\")
        sign = yield from scan.peek()
        yield from scan.expect(sign)
        text = _ESCAPES.get(sign)
        if text is None and sign in _HEX_ESCAPES:
            code = yield from self._code(_HEX_ESCAPES[sign])
            if 0xD800 <= code < 0xDC00 and (yield from scan.begins("\\u")):  # JSON writes some characters as two
                code = 0x10000 + ((code - 0xD800) << 10) + (yield from self._code(4)) - 0xDC00
            text = "\ufffd" if 0xD800 <= code < 0xE000 or not 0 <= code < 0x110000 else chr(code)
        elif text is None:
            text = sign if sign in "'\"\\/" else f"\\{sign}"
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _code(self, length: int) -> Steps[int]:
        """Read ``length`` hexadecimal digits."""
        digits = ""
        for _ in range(length):
            digit = yield from self.scan.peek()
            if digit not in hexdigits:
                raise Malformed
            yield from self.scan.expect(digit)
            digits += digit
        return int(digits, 16)


class PythonicFrame(Frame):
    """Values are written as JSON, which the parser reads too."""

    first, between, last = "[", ", ", "]"

    def call(self, lark: Lark, function: Function) -> str:
        """Required parameters come first. ``more_i`` matches the optional ones from the i-th on, each behind a comma, and
        ``first_i`` where none came before."""
        named = {name: self._parameter(lark, function, name, place) for place, name in enumerate(function.properties)}
        required = [rule for name, rule in named.items() if function.requires(name)]
        optional = [rule for name, rule in named.items() if not function.requires(name)]
        comma = lark.literal(", ")
        more = first = '""'
        for place, rule in reversed([*enumerate(optional)]):
            first = lark.rule(f"first_{function.index}_{place}", f"{rule} {more} | {first}")
            more = lark.rule(f"more_{function.index}_{place}", f"{comma} {rule} {more} | {more}")
        inner = f" {comma} ".join(required) + f" {more}" if required else first
        return f"{lark.literal(function.name + '(')} {inner} {lark.literal(')')}"

    def _parameter(self, lark: Lark, function: Function, name: str, place: int) -> str:
        if not name.isidentifier() or iskeyword(name) or len(name) > MAX_NAME:
            raise SchemaError(f"the parameter {name[:MAX_NAME]!r} cannot be named in Python")
        written = json_text(lark, function) if function.text else lark.json(function.properties[name])
        value = lark.rule(f"value_{function.index}_{place}", written)
        return lark.rule(f"parameter_{function.index}_{place}", f"{lark.literal(name + '=')} {value}")
