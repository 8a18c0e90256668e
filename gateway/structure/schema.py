"""JSON Schemas as clients send them: their references, and the form that llguidance reads without loss."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

MAX_HOPS = 64
"""Most references in a row that :func:`resolved` follows."""
EXACT = 2**53
"""llguidance compares numbers as float64, which has every integer up to this."""

_2020 = "https://json-schema.org/draft/2020-12/schema"
_DRAFTS = (
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    "https://json-schema.org/draft/2019-09/schema",
    _2020,
)
_FLOATS = (1.7976931348623157e308, 3.4028234663852886e38)
_LOWEST = (-(2**63), 1 - 2**63, *(-each for each in _FLOATS))
_HIGHEST = (2**63, 2**63 - 1, 2**64, 2**64 - 1, *_FLOATS)
_LIMITS = {"minimum": _LOWEST, "exclusiveMinimum": _LOWEST, "maximum": _HIGHEST, "exclusiveMaximum": _HIGHEST}
"""Bounds that only state the range of a type: int64, uint64, float64 or float32."""
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
"""Keywords whose values have names of the schema's author as keys."""
_DATA = ("default", "example", "examples", "x-guidance")


class InexactNumber(ValueError):
    """A number that cannot be enforced exactly. The message is a clause for the client."""


def target(root: Any, reference: str) -> Any:
    """Return the part of ``root`` that the JSON pointer ``reference`` names; None if there is none."""
    found = root
    if not reference.startswith("#"):
        return None
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return None
    return found


def resolved(root: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with the keywords of what its ``$ref`` leads to; its own keywords take precedence. As it is, if the
    reference leads nowhere."""
    for _ in range(MAX_HOPS):
        found = target(root, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
        if not isinstance(found, dict):
            break
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def for_llguidance(schema: Any) -> Any:
    """Return ``schema`` for llguidance: references are URIs, an unknown ``$schema`` is left out, bounds at the limits of a type are
    too, and ``additionalItems`` beside ``prefixItems`` is ``items``. Raises :class:`InexactNumber`."""
    draft = str(schema.get("$schema", _2020)).rstrip("#") if isinstance(schema, dict) else _2020
    return _rewritten(schema, tuples=draft not in _DRAFTS[:-1])


def _rewritten(schema: Any, *, tuples: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(each, tuples=tuples) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _rewritten(each, tuples=tuples) for name, each in value.items()}
        elif key in _LIMITS and type(value) in (int, float):
            if value not in _LIMITS[key]:
                if isinstance(value, int):
                    _check_exact(value, exclusive=key.startswith("exclusive"))
                found[key] = value
        elif key in ("const", "enum"):
            _check_exact(value)
            found[key] = value
        elif key in ("$ref", "$id", "id") and isinstance(value, str):
            found[key] = re.sub("%(?![0-9a-fA-F]{2})", "%25", quote(value, safe="%#/:?@!$&'()*+,;=~"))
        elif key != "$schema" or str(value).rstrip("#") in _DRAFTS:
            found[key] = value if key in _DATA else _rewritten(value, tuples=tuples)
    if tuples and "prefixItems" in found and "items" not in found and "additionalItems" in found:
        found["items"] = found.pop("additionalItems")
    return found


def _check_exact(value: Any, *, exclusive: bool = False) -> None:
    """Raise :class:`InexactNumber` for integers in ``value`` that float64 lacks, and for fractions with so many digits that
    llguidance may read the next float64."""
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _check_exact(each)
    elif (isinstance(value, int) and abs(value) > EXACT and (exclusive or int(float(value)) != value)) or (
        isinstance(value, float) and int("".join(map(str, Decimal(repr(value)).as_tuple().digits))) > EXACT
    ):
        raise InexactNumber(f"the number {value} has too many digits to be enforced exactly; send such numbers as texts")


def fits_depth(schema: Any, most: int) -> bool:
    """Whether ``schema`` has at most ``most`` levels, where what a ``$ref`` leads to is a level below it. Each target counts where
    it is met first, so recursive references end."""
    seen: set[int] = set()
    waiting = [(schema, 1)]
    while waiting:
        value, level = waiting.pop()
        if level > most:
            return False
        if isinstance(value, dict):
            parts = [each for key, each in value.items() if key not in _DEFINITIONS]
            found = target(schema, value["$ref"]) if isinstance(value.get("$ref"), str) else None
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                parts.append(found)
        else:
            parts = value if isinstance(value, list) else []
        waiting += [(each, level + 1) for each in parts]
    return True
