"""The families of tool calls: parsers of their calls, frames that build grammars of them, and which chat templates ask for them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from string import hexdigits
from typing import Any

import msgspec

from yardstick_llm.gateway.output.constraint import resolved
from yardstick_llm.gateway.output.lark import Lark, quoted
from yardstick_llm.gateway.output.parser import MAX_NAME, Malformed, Scanner, Steps, ToolParser, call_id, held_for, short_call_id
from yardstick_llm.gateway.schemas.chat import CUSTOM_INPUT

_QUOTE = '"'
_INPUT = f'{{"{CUSTOM_INPUT}": '


class SchemaError(ValueError):
    """The parameters of a function cannot be forced. The message names the part and the problem."""


@dataclass(frozen=True)
class Function:
    """A function that a grammar allows to be called."""

    index: int
    """Its place among the request's tools."""
    name: str
    schema: dict[str, Any]
    """JSON schema of its arguments, an object."""
    text: str = ""
    """The Lark grammar of a custom tool's text; empty for any text."""
    pattern: str = ""
    """The regular expression that ``text`` consists of, between slashes; empty if it is another grammar."""

    @property
    def properties(self) -> dict[str, Any]:
        """Schemas of the parameters. Each can be used alone: it has the definitions of the whole. Raises :class:`SchemaError`."""
        given = self.schema.get("properties") or {}
        shared = {name: self.schema[name] for name in ("$defs", "definitions", "x-guidance") if name in self.schema}
        for name, schema in given.items() if isinstance(given, dict) else ():
            if not isinstance(schema, dict):
                raise SchemaError(f"properties.{name} is no object")
        return {name: shared | resolved(self.schema, schema) for name, schema in given.items()} if isinstance(given, dict) else {}

    def requires(self, name: str) -> bool:
        """Whether the parameter ``name`` must be given."""
        return name in listed(self.schema, "required")


def listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    """Return the list that ``schema`` has for ``keyword``; an empty one if it has none."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


class Frame(ABC):
    """Builds the expressions of calls."""

    marker: str | None = None
    """Text that begins each call, or with ``listed`` all of them; None if calls can only be the whole answer."""
    listed = False
    raw_texts = False
    """Whether parameters that are texts are written as they are, and not as JSON."""
    first = last = between = ""
    """Texts before the first call, behind the last one and between two. With a marker for each call, they are outside of these."""

    @abstractmethod
    def call(self, lark: Lark, function: Function) -> str:
        """Match one call, without its marker. Raises :class:`SchemaError`."""

    def calls(self, lark: Lark, functions: Sequence[Function], *, several: bool) -> str:
        """Match one call, or with ``several`` any number from one on, without the first marker."""
        names = [lark.rule(f"call_{function.index}", self.call(lark, function)) for function in functions]
        call = lark.rule("call", " | ".join(names))
        again = lark.marker(self.marker) if self.marker is not None and not self.listed else ""
        more = f"({lark.spelled(self.between)} {again} {call})*" if several else '""'
        return lark.rule("calls", f"{lark.spelled(self.first)} {call} {more} {lark.spelled(self.last)}")

    def free(self, lark: Lark, calls: str, markers: Sequence[str]) -> str:
        """Match text, or the expression ``calls``, or text and then calls. The text contains none of ``markers``, which the
        family's parser would read as a call."""
        if self.marker is None:  # a text must not begin like a call
            begin = rf"/([ \n]*[^ \n{re.escape(self.first or '{')}](.|\n)*)?/"
            return f"{calls} | {lark.text_without('other', markers, begin)}"
        before = lark.text_until("before_calls", self.marker, without=[marker for marker in markers if marker != self.marker])
        return f"{lark.text_without('other', markers)} | {before} {calls}"


def json_call(lark: Lark, function: Function, key: str) -> str:
    """Match ``{"name": …, key: …}``."""
    begin = lark.literal(f'{{"name": "{function.name}", "{key}": ')
    return f"{begin} {arguments(lark, function)} {lark.literal('}')}"


def arguments(lark: Lark, function: Function) -> str:
    """Match the arguments as a JSON object."""
    if function.text:
        return f"{lark.literal(_INPUT)} {json_text(lark, function)} {lark.literal('}')}"
    return lark.rule(f"arguments_{function.index}", lark.json(function.schema))


def json_text(lark: Lark, function: Function) -> str:
    """Match the text of a custom tool with a grammar as a JSON string."""
    text = lark.embedded(f"text_{function.index}", quoted(function.text))
    return f"{lark.literal(_QUOTE)} {text} {lark.literal(_QUOTE)}"


def raw_text(lark: Lark, function: Function, end: str, without: Sequence[str]) -> str:
    """Match the text of a custom tool with a grammar as it is, and the text ``end`` behind it.

    A regular expression is matched up to the first ``end``, without the texts ``without``. Another grammar must not be able to go
    on with ``end``.
    """
    if function.pattern:
        return lark.text_until(f"text_{function.index}", end, without, function.pattern)
    return f"{lark.embedded(f'text_{function.index}', function.text)} {lark.spelled(end)}"


def _tag(name: str) -> str:
    """The tags have a fullwidth bar, and U+2581 for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


ALL, ALL_END = _tag("tool calls begin"), _tag("tool calls end")
CALL, CALL_END, SEPARATOR = _tag("tool call begin"), _tag("tool call end"), _tag("tool sep")
BLOCK, BLOCK_END = "```json\n", "\n```"
KIND = "function"


class DeepSeekParser(ToolParser):
    """DeepSeek: V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments in a block of Markdown, V3.1 and later
    ``NAME<｜tool▁sep｜>ARGUMENTS``. Reads both, whichever the model writes. The tags around all calls may be missing."""

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


OPEN, CLOSE = "<tool_call>", "</tool_call>"
LINE = "\n"


class HermesParser(ToolParser):
    """Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, once for each call. A closing tag that is missing,
    as at the end of an answer, is tolerated."""

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


PYTHON_TAG = "<|python_tag|>"


class LlamaJsonParser(ToolParser):
    """Llama 3.1 to 3.3: ``{"name": …, "parameters": {…}}`` as the whole answer or after ``<|python_tag|>``, separated by ``;``.
    Without the tag, only the beginning of an answer is a call; elsewhere, JSON is text."""

    markers = (PYTHON_TAG,)

    def opening(self) -> Steps[None]:
        scan = self.scan
        yield from scan.space()
        if scan.unread and scan.text[scan.at] == "{":
            yield from self._calls()

    def call(self) -> Steps[None]:
        yield from self.scan.expect(PYTHON_TAG)
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
            yield from scan.begins(PYTHON_TAG)
            yield from scan.space()
            if not scan.unread:
                return self.consume()


class LlamaJsonFrame(Frame):
    """Calls without the tag, which introduces built-in tools."""

    between = "; "

    def call(self, lark: Lark, function: Function) -> str:
        return json_call(lark, function, "parameters")


TOOL_CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """Reads both formats, whichever the model writes."""

    markers = (TOOL_CALLS,)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(TOOL_CALLS)
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

    marker, listed = TOOL_CALLS, True
    first, between, last = "[", ", ", "]"

    def call(self, lark: Lark, function: Function) -> str:
        return json_call(lark, function, "arguments")


class MistralNamedFrame(Frame):
    """The format with a marker before the arguments."""

    marker = TOOL_CALLS

    def call(self, lark: Lark, function: Function) -> str:
        return f"{lark.literal(function.name)} {lark.marker(ARGS)} {arguments(lark, function)}"


PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"

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

    markers = (PYTHON_START,)

    def opening(self) -> Steps[None]:
        scan = self.scan
        yield from scan.space()
        if scan.unread and scan.text[scan.at] == "[":
            yield from self.calls_in_list(self._call)

    def call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.expect(PYTHON_START)
        yield from scan.space()
        yield from self.calls_in_list(self._call)
        yield from scan.space()
        if (yield from scan.begins(PYTHON_END)):
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


MAX_DEPTH = 8

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"

VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
"""Texts that end a value: its closing tag, or if the model forgets it, the next tag on a line of its own."""


class Qwen3CoderParser(ToolParser):
    """Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

    A value stands between line breaks, which are not part of it. A text is written as it is, everything else as JSON. The outer
    tags may be missing, as this family's models sometimes leave them out.
    """

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
            self.arguments(f"{before}{_quoted(key)}: ")
            yield from self._other_value() if key in not_texts else self._text_value()
            yield from scan.begins(LINE)
            yield from scan.begins(PARAMETER_END)
            self.consume()
            before = ", "

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
    text = _WORDS.get(text, text)
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


@dataclass(frozen=True)
class Family:
    """A format of tool calls."""

    parser: type[ToolParser]
    frame: Frame
    """Builds grammars of calls."""
    signs: tuple[tuple[str, ...], ...]
    """The texts of chat templates that ask for this format: one of these groups occurs as a whole."""
    tokens: tuple[str, ...] = ()
    """Texts of the format that are special tokens in the vocabularies of some models."""
    new_id: Callable[[], str] = call_id

    def asked_for(self, template: str) -> bool:
        """Whether the chat template ``template`` asks for this format."""
        return any(all(sign in template for sign in group) for group in self.signs)


_DEEPSEEK = (ALL, ALL_END, CALL, CALL_END, SEPARATOR)

FAMILIES: dict[str, Family] = {
    "mistral_named": Family(
        MistralParser, MistralNamedFrame(), (("[TOOL_CALLS]", "[ARGS]"),), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_call_id
    ),
    "mistral": Family(MistralParser, MistralFrame(), (("[TOOL_CALLS]",),), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_call_id),
    "qwen3_coder": Family(Qwen3CoderParser, Qwen3CoderFrame(), (("<function=", "<parameter="),), (OPEN, CLOSE)),
    "deepseek_block": Family(DeepSeekParser, DeepSeekBlockFrame(), ((SEPARATOR, "```json"),), _DEEPSEEK),
    "deepseek": Family(DeepSeekParser, DeepSeekFrame(), ((SEPARATOR,),), _DEEPSEEK),
    "hermes": Family(HermesParser, HermesFrame(), (("<tool_call>", '"arguments"'),), (OPEN, CLOSE)),
    "pythonic": Family(
        PythonicParser, PythonicFrame(), (("<|python_start|>",), ("[func_name1(",)), ("<|python_start|>", "<|python_end|>")
    ),
    "llama_json": Family(
        LlamaJsonParser, LlamaJsonFrame(), (("<|python_tag|>",), ('"parameters": dictionary',)), ("<|python_tag|>",)
    ),
}
"""Families by name. Where several fit a template, the first one counts, because the later ones ask for less. One parser reads both
of Mistral's formats; only what is forced differs."""


def family_of(template: str) -> str | None:
    """Return the name of the family that the chat template ``template`` asks for; None if it asks for none that is known."""
    plain = template.replace('\\"', '"')  # in Jinja's strings, quotes may be escaped
    return next((name for name, family in FAMILIES.items() if family.asked_for(plain)), None)
