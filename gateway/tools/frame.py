"""The base of what surrounds the arguments of tool calls in each family, for grammars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tools.lark import Lark


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

    @property
    def properties(self) -> dict[str, Any]:
        """Schemas of the parameters. Each can be used alone: it has the definitions of the whole. Raises :class:`SchemaError`."""
        given = self.schema.get("properties") or {}
        shared = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        for name, schema in given.items() if isinstance(given, dict) else ():
            if not isinstance(schema, dict):
                raise SchemaError(f"properties.{name} is no object")
        return {name: shared | schema for name, schema in given.items()} if isinstance(given, dict) else {}

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
        more = f"({lark.literal(self.between)} {again} {call})*" if several else '""'
        return lark.rule("calls", f"{lark.literal(self.first)} {call} {more} {lark.literal(self.last)}")


def json_call(lark: Lark, function: Function, key: str) -> str:
    """Match ``{"name": …, key: …}``."""
    begin = lark.literal(f'{{"name": "{function.name}", "{key}": ')
    return f"{begin} {arguments(lark, function)} {lark.literal('}')}"


def arguments(lark: Lark, function: Function) -> str:
    """Match the arguments as a JSON object."""
    return lark.rule(f"arguments_{function.index}", lark.json(function.schema))
