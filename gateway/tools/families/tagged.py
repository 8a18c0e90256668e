"""The base of formats whose parameters are tags: a text is written as it is, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, ClassVar

import msgspec

from gateway.structure.schema import resolved
from gateway.tools.frame import listed
from gateway.tools.parser import ToolParser
from gateway.tools.scanner import Scanner, Steps, held_for

MAX_DEPTH = 8
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class TaggedParser(ToolParser):
    """Reads values between tags, and passes them on as the members of a JSON object."""

    value_ends: ClassVar[tuple[str, ...]]
    """Texts that end a value."""

    def member(self, key: str, before: str, not_texts: Collection[str]) -> Steps[None]:
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
            end, ended = _value_end(scan, self.value_ends, scan.at)
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
            end, ended = _value_end(scan, self.value_ends, scan.at + searched)
            searched = end - scan.at
            if not ended:
                yield from scan.more()
        text = scan.text[scan.at : scan.at + searched].strip()
        scan.at += searched
        self.arguments(_as_json(text))


def _value_end(scan: Scanner, ends: tuple[str, ...], begin: int) -> tuple[int, bool]:
    """Return the end of the value's text that is certain, searching from ``begin`` on, and whether the value ends there."""
    found = min((place for end in ends if (place := scan.text.find(end, begin)) >= 0), default=-1)
    if found >= 0:
        return found, True
    return (len(scan.text) if scan.ended else held_for(scan.text, begin, ends)), False


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
