"""The constraint of a request, in whichever field it comes, and its grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine.wire import MAX_GRAMMAR_BYTES
from gateway.errors import InvalidRequest
from gateway.schemas.structure import ResponseFormat, StructuredOutputs, StructuredRequest
from gateway.structure.grammar import GrammarTextError, of_choice, of_ebnf, of_json_object, of_json_schema, of_regex
from gateway.structure.schema import fits_depth

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
    _check_references(given, param)
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


def _check_references(schema: Any, param: str) -> None:
    """Raise :class:`InvalidRequest` for a schema that is nested too deeply through references."""
    if not fits_depth(schema, MAX_REFERENCED_DEPTH):
        message = f"`{param}` is nested more than {MAX_REFERENCED_DEPTH} levels deep through `$ref`."
        raise InvalidRequest(message, param=param)


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
