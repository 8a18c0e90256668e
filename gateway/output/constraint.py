"""Constraints of the output - schemas, patterns, choices and grammars - as one text: a grammar of llguidance.

:func:`constraint_of` finds the constraint of a request in whichever field it comes, and :func:`grammar_of` converts it.
``compile.py`` checks the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import quote, unquote

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from engine.wire import MAX_GRAMMAR_BYTES
from gateway.errors import InvalidRequest
from gateway.schemas.structure import ResponseFormat, StructuredOutputs, StructuredRequest

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


WHITESPACE = r"[ ]?|\r?\n[ \t]{0,20}"
"""Whitespace between the tokens of JSON, unless the schema's ``x-guidance`` says otherwise: one space, or a line break and an
indent. Without a bound, a model may write whitespace until its tokens run out."""


REGEX_START = "start: "
"""Beginning of the grammar of a regular expression, before the expression."""


class GrammarTextError(ValueError):
    """The text of a grammar cannot be read. The message is a clause for the client."""


def of_json_schema(schema: dict[str, Any] | bool) -> str:
    """A grammar for JSON that a schema describes. Raises :class:`GrammarTextError` for numbers that cannot be enforced exactly."""
    whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {"allOf": [schema]}
    options = whole.get("x-guidance", {})
    if isinstance(options, dict) and options.get("whitespace_flexible", True):
        whole["x-guidance"] = {"whitespace_pattern": WHITESPACE, **options}
    try:
        return msgspec.json.encode({"grammars": [{"json_schema": for_llguidance(whole)}]}).decode()
    except InexactNumber as error:
        raise GrammarTextError(str(error)) from None
    except (OverflowError, msgspec.MsgspecError, RecursionError) as error:
        raise GrammarTextError(str(error)) from None


def of_json_object() -> str:
    """A grammar for any JSON object."""
    return of_json_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """A grammar for texts that ``pattern``, in the syntax of Rust's regex crate, matches as a whole. ``\\d``, ``\\w`` and
    ``\\s`` are ASCII characters."""
    return f"{REGEX_START}/{regex_to_lark(pattern, use_ascii='dws')}/"


def of_choice(choices: Sequence[str]) -> str:
    """A grammar for one of several texts."""
    return "start: " + "\n    | ".join(json.dumps(choice) for choice in choices)


def of_ebnf(text: str) -> str:
    """A grammar in llguidance's Lark dialect, or in GBNF (llama.cpp's and xgrammar's EBNF, with ``::=``). ``<|im_end|>`` and
    ``<[1234]>`` name control tokens, ``%json {...}`` embeds a schema. Raises :class:`GrammarTextError`."""
    try:
        return any_to_lark(text)
    except RecursionError:
        raise GrammarTextError("it is nested too deeply") from None
    except Exception as error:  # the library raises bare Exception
        raise GrammarTextError(str(error)) from None


Kind = Literal["json_object", "json", "regex", "choice", "grammar"]

MAX_BYTES = MAX_GRAMMAR_BYTES // 2
"""Most bytes of a constraint; its grammar may be longer."""
MAX_DEPTH = 64
"""Deepest nesting of a schema."""
MAX_REFERENCED_DEPTH = 256
"""Deepest nesting of a schema, if what a ``$ref`` leads to is nested in it."""
MAX_NODES = 20_000
"""Most objects, lists and values in a schema."""

_FORMS: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


@dataclass(frozen=True)
class OutputConstraint:
    """The grammar, schema or choice that the output must follow."""

    kind: Kind
    value: Any
    """A schema or its text for ``json``, texts for ``choice``, a text for ``regex`` and ``grammar``."""
    param: str
    """Field of the request that holds it."""


def constraint_of(request: StructuredRequest) -> OutputConstraint | None:
    """Return the constraint of ``request``, if any. Raises :class:`InvalidRequest` for several."""
    found = [OutputConstraint(kind, value, name) for name, kind in _FORMS.items() if (value := getattr(request, name)) is not None]
    if (constraint := _of_response_format(request)) is not None:
        found.append(constraint)
    if request.structured_outputs is not None:
        found.append(_of_structured_outputs(request.structured_outputs))
    if len(found) > 1:
        names = " and ".join(f"`{constraint.param}`" for constraint in found[:2])
        raise InvalidRequest(f"{names} both constrain the output; send one of them.", param=found[1].param)
    return found[0] if found else None


def grammar_of(constraint: OutputConstraint) -> str:
    """Return the grammar of ``constraint``, not compiled. Raises :class:`InvalidRequest` if it is too large or cannot be read."""
    param, value = constraint.param, constraint.value
    if isinstance(value, str | list):
        _check_bytes(sum(len(text.encode()) for text in ([value] if isinstance(value, str) else value)), param)
    try:
        if constraint.kind == "json_object":
            return of_json_object()
        if constraint.kind == "json":
            return _of_schema(value, param)
        if constraint.kind == "regex":
            return of_regex(value)
        return of_choice(value) if constraint.kind == "choice" else of_ebnf(value)
    except GrammarTextError as error:
        raise InvalidRequest(f"`{param}` cannot be read: {error}.", param=param) from None


def _of_response_format(request: StructuredRequest) -> OutputConstraint | None:
    given = request.response_format
    if given is None:
        return None
    if given.schema is not None:
        if given.type not in ("json_object", "json_schema") or given.json_schema is not None:
            message = "`response_format.schema` goes with the type 'json_object', or with 'json_schema' in place of `json_schema`."
            raise InvalidRequest(message, param="response_format.schema")
        return OutputConstraint("json", given.schema, "response_format.schema")
    if given.value is not None or given.type in ("json", "regex"):
        return _of_value(given)
    if given.type == "text":
        return None
    if given.type == "json_object":
        return OutputConstraint("json_object", None, "response_format")
    if given.json_schema is None:
        message = "`response_format` of type 'json_schema' needs `json_schema` with a `schema`."
        raise InvalidRequest(message, param="response_format.json_schema")
    return OutputConstraint("json", given.json_schema.schema, "response_format.json_schema.schema")


def _of_value(given: ResponseFormat) -> OutputConstraint:
    """Read the form of TGI. Raises :class:`InvalidRequest`."""
    param, value = "response_format.value", given.value
    if given.type in ("json", "json_object") and isinstance(value, dict | bool):
        return OutputConstraint("json", value, param)
    if given.type == "regex" and isinstance(value, str):
        return OutputConstraint("regex", value, param)
    message = "`response_format.value` is a JSON Schema with the type 'json' or 'json_object', and a pattern with the type 'regex'."
    raise InvalidRequest(message, param=param)


def _of_structured_outputs(given: StructuredOutputs) -> OutputConstraint:
    forms: tuple[tuple[Kind, Any], ...] = (
        ("json", given.json),
        ("regex", given.regex),
        ("choice", given.choice),
        ("grammar", given.grammar),
        ("json_object", given.json_object or None),
    )
    found = [OutputConstraint(kind, value, f"structured_outputs.{kind}") for kind, value in forms if value is not None]
    if len(found) != 1:
        names = ", ".join(f"`{kind}`" for kind, _ in forms)
        message = f"`structured_outputs` needs exactly one of {names}."
        raise InvalidRequest(message, param="structured_outputs")
    return found[0]


def _of_schema(given: Any, param: str) -> str:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"`{param}` is not JSON: {error}.", param=param) from None
    if not isinstance(given, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema: an object or a boolean.", param=param)
    _check_nesting(given, param)
    if not fits_depth(given, MAX_REFERENCED_DEPTH):
        message = f"`{param}` is nested more than {MAX_REFERENCED_DEPTH} levels deep through `$ref`."
        raise InvalidRequest(message, param=param)
    grammar = of_json_schema(given)
    _check_bytes(len(grammar.encode()), param)
    return grammar


def _check_bytes(count: int, param: str) -> None:
    if count > MAX_BYTES:
        raise InvalidRequest(f"`{param}` has {count} bytes; at most {MAX_BYTES} are allowed.", param=param)


def _check_nesting(schema: Any, param: str) -> None:
    """Raise :class:`InvalidRequest` for a schema that is nested too deeply or has too many parts. Not recursive."""
    level, nodes = [schema], 0
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise InvalidRequest(f"`{param}` has more than {MAX_NODES} values; send a smaller schema.", param=param)
        level = [part for value in level for part in _parts(value)]
        if not level:
            return
    raise InvalidRequest(f"`{param}` is nested more than {MAX_DEPTH} levels deep.", param=param)


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
