"""The base of what surrounds the arguments of tool calls in each family, for grammars."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.schemas.tools import CUSTOM_INPUT
from gateway.structure.lark import Lark
from gateway.structure.quoted import quoted
from gateway.structure.schema import resolved

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
