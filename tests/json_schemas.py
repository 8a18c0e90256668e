"""Random JSON schemas of the kinds that JSONSchemaBench has: configurations, function calls, resources and forms."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

FORMATS = ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = [r"^[A-Z]{2}-\d{3}$", r"^(foo|bar)+$", r"^#[0-9a-f]{6}$", r"^\d{1,3}(\.\d{1,3}){3}$", r"^[a-z_][a-z0-9_]{0,8}$"]
NAMES = ["name", "id", "kind", "größe", "数", "a b", 'quo"te', "back\\slash", "x-y", "$ref-like", "é", "😀", "value", "tags"]
CONSTANTS: list[Any] = [None, True, False, 0, -7, 2.5, "red", "", "ünï", 'a "b"', "<|im_end|>", [1, "x"], {"a": {"b": [None]}}]
OPEN = {"additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99}}


def random_schema(rng: random.Random) -> Schema:
    """An object, array or value, sometimes with definitions that refer to themselves."""
    schema = _object(rng, 3) if rng.random() < 0.6 else _any(rng, 3)
    if rng.random() < 0.25:
        node = {"type": "object", "properties": {"v": _leaf(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
        tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        defs = {"node": node | {"required": ["v"], "additionalProperties": False}, "tree": tree, "leaf": _leaf(rng)}
        properties = {name: {"$ref": f"#/$defs/{name}"} for name in defs}
        return {"$defs": defs, "type": "object", "properties": properties, "required": ["node"], "additionalProperties": False}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    if depth == 0 or rng.random() < 0.35:
        return _leaf(rng)
    return rng.choice([_object, _array, _union, _all_of, _tuple])(rng, depth - 1)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(
        [
            _string,
            _number,
            _integer,
            lambda rng: {"enum": rng.sample(CONSTANTS, rng.randint(1, 5))},
            lambda rng: {"const": rng.choice(CONSTANTS)},
            lambda rng: {"type": "boolean"},
            lambda rng: {"type": [rng.choice(["boolean", "integer"]), "null"]},
        ]
    )(rng)


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(12)}


def _number(rng: random.Random) -> Schema:
    low = rng.choice([-100, -1.5, 0, 0.25, 10])
    return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.choice([1, 10.5, 1000])}


def _integer(rng: random.Random) -> Schema:
    low = rng.randrange(-1000, 1000)
    if rng.random() < 0.2:
        return {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0, "maximum": 1000}
    return {"type": "integer", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randrange(1, 5000)}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 5))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    kind = rng.randrange(4)
    if kind == 0:
        schema |= OPEN
    elif kind == 1:
        schema |= {"patternProperties": {"^p_[0-9]$": _leaf(rng)}, "additionalProperties": False}
    else:
        schema["additionalProperties"] = False
    return {"title": "a title", "description": "ignored", "default": {}} | schema if rng.random() < 0.2 else schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(3)
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randrange(3)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    places = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": len(places)}


def _union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}
    kinds = [{"type": "integer", "minimum": 0, "maximum": 50}, {"type": "boolean"}, {"type": "null"}, {"enum": ["one", "two"]}]
    return {"oneOf": rng.sample(kinds, rng.randint(1, 3))}


def _all_of(rng: random.Random, depth: int) -> Schema:
    first = {"type": "object", "properties": {"a": _any(rng, depth)}, "required": ["a"]}
    return {"allOf": [first, {"type": "object", "properties": {"b": _leaf(rng)}, "required": ["b"]}]}
