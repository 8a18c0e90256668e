"""Constraints of an output: schemas, patterns, choices and grammars become one grammar, which is compiled once to refuse those that
engines could not follow.

:func:`constraint_of` finds the constraint of a request in whichever field it comes, and :func:`grammar_of` converts it.
``compile.py`` checks the result.

A worker compiles a grammar as an engine will, and computes what may come first. Whatever takes longer than
:data:`COMPILE_SECONDS` is refused. llguidance cannot be interrupted and may overflow its stack, so each new grammar is compiled in
a child process: the kernel ends it at twice that time, and the worker lives on and remembers the grammar.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import quote, unquote

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from yardstick_llm.engine.wire import GRAMMAR_BOUNDS, GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES, GrammarVocabulary
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.process.signals import ending_with
from yardstick_llm.gateway.schemas.generation import ResponseFormat, StructuredOutputs, StructuredRequest

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
    too, ``additionalItems`` beside ``prefixItems`` is ``items``, and negated classes of patterns are without U+0000. Raises
    :class:`InexactNumber`."""
    draft = str(schema.get("$schema", _2020)).rstrip("#") if isinstance(schema, dict) else _2020
    return _rewritten(schema, tuples=draft not in _DRAFTS[:-1])


def _rewritten(schema: Any, *, tuples: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(each, tuples=tuples) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = _without_nul(value)
        elif key in _NAMED and isinstance(value, dict):
            names = _without_nul if key == "patternProperties" else str
            found[key] = {names(name): _rewritten(each, tuples=tuples) for name, each in value.items()}
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


_PATTERN_PART = re.compile(r"\\.|\[\^?\]?|\]|[^\\\[\]]+|\\", re.DOTALL)
"""Escapes, beginnings and ends of classes, and what is between them."""


def _without_nul(pattern: str) -> str:
    """``pattern`` without U+0000 in negated classes. Of a class with it, llguidance 1.9 accepts any escape in JSON: ``\\"`` for
    ``[^"]``."""
    pieces, depth = [], 0
    for found in _PATTERN_PART.finditer(pattern):
        part = found[0]
        if part.startswith("["):
            if part.startswith("[^") and depth == 0:
                part = r"[^\x00\]" if part.endswith("]") else r"[^\x00"  # a first bracket is a member
            depth += 1
        elif part == "]":
            depth = max(depth - 1, 0)
        pieces.append(part)
    return "".join(pieces)


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


def json_of(schema: Any, style: dict[str, Any]) -> str:
    """An expression of Lark for JSON that ``schema`` describes. ``style``: options of ``x-guidance``; those of the schema take
    precedence. Raises :class:`InexactNumber`."""
    whole, style = _with_style(schema, style)
    try:
        return _embedded(for_llguidance(whole) | {"x-guidance": style})
    except InexactNumber as error:
        if not isinstance(style, dict):
            raise
        return _Spread(whole, style, error).expression(whole)


def _embedded(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False, separators=(',', ':'))}"


def _with_style(schema: Any, style: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {"allOf": [schema]}
    options = whole.pop("x-guidance", {})
    flexible = not isinstance(options, dict) or options.get("whitespace_flexible", True)
    if not flexible:
        style = {key: value for key, value in style.items() if key != "whitespace_pattern"}
    return whole, style | options if isinstance(options, dict) else options


_NOTES = ("type", "title", "description", "$schema", "$id", "x-guidance", *_DATA, *_DEFINITIONS)
_SHAPES = {"enum": list, "anyOf": list, "properties": dict, "required": list, "minItems": int, "maxItems": int}
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


class _Spread:
    """A schema as an expression of Lark in which numbers that llguidance would round are literals, such as ids of 19 digits in
    ``enum``. Objects and lists around them are spelled out, and have only the properties that the schema names."""

    def __init__(self, root: dict[str, Any], style: dict[str, Any], problem: InexactNumber) -> None:
        """``problem``: raised where a part around a number cannot be spelled out."""
        self._root, self._style, self._problem = root, style, problem
        self._space = style.get("whitespace_pattern", "") if style.get("whitespace_flexible", True) else ""
        self._spent = 0

    def _spend(self, amount: int) -> None:
        """Count bytes that are written and values that are visited: references may lead to one part many times."""
        self._spent += amount
        if self._spent > MAX_BYTES:
            raise self._problem

    def expression(self, schema: Any, depth: int = 0) -> str:
        """Return the expression for a part of the schema. Raises :class:`InexactNumber`."""
        if depth > MAX_DEPTH:  # a `$ref` that leads to itself
            raise self._problem
        if isinstance(schema, dict):
            schema = resolved(self._root, schema)
        try:
            text = _embedded(for_llguidance(self._alone(schema)) | {"x-guidance": self._style})
        except InexactNumber:
            text = self._spelled(schema, depth)
        self._spend(len(text))
        return text

    def _spelled(self, schema: dict[str, Any], depth: int) -> str:
        asked = {key for key in schema if key not in _NOTES}
        given = schema.get("type", list(_TYPES))
        types = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)]
        if any(key in _SHAPES and not isinstance(schema[key], _SHAPES[key]) for key in asked):
            raise self._problem
        if asked in ({"const"}, {"enum"}):
            values = schema["enum"] if "enum" in asked else [schema["const"]]
            fitting = [each for each in values if type(each) in {kind for name in types for kind in _TYPES.get(name, ())}]
            found = [json.dumps(json.dumps(each, ensure_ascii=False)) for each in fitting]
        elif asked == {"anyOf"}:
            found = [self.expression(each, depth + 1) for each in schema["anyOf"]]
        elif "properties" in asked and asked <= {"properties", "required", "additionalProperties"}:
            found = [self._object(schema, depth), *self._others(schema, types, "object")]
        elif "items" in asked and asked <= {"items", "minItems", "maxItems"}:
            found = [self._array(schema, depth), *self._others(schema, types, "array")]
        else:
            found = []
        if not found:
            raise self._problem
        return f"({' | '.join(found)})"

    def _others(self, schema: dict[str, Any], types: list[str], spelled: str) -> list[str]:
        others = [each for each in types if each != spelled] if "type" in schema else []
        return [_embedded({"type": others, "x-guidance": self._style})] if others else []

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        """The properties in the order of the schema. The first one that is there is followed by the others with a comma each."""
        properties, required = schema["properties"], [each for each in schema.get("required", []) if isinstance(each, str)]
        colon, comma = self._mark(self._style.get("key_separator", ":")), self._mark(self._style.get("item_separator", ","))
        values = {name: self.expression(properties.get(name, True), depth + 1) for name in [*properties, *required]}
        members = {name: f"{json.dumps(json.dumps(name, ensure_ascii=False))} {colon} {value}" for name, value in values.items()}
        alternatives: list[str] = []
        names = list(members)
        for place, name in enumerate(names):
            rest = " ".join(f"({comma} {members[each]}){'' if each in required else '?'}" for each in names[place + 1 :])
            alternatives.append(f"{members[name]} {rest}")
            self._spend(len(rest))
            if name in required:
                break
        else:
            alternatives.append('""')
        return f"{self._mark('{', before=False)} ({' | '.join(alternatives)}) {self._mark('}', after=False)}"

    def _array(self, schema: dict[str, Any], depth: int) -> str:
        item, comma = self.expression(schema["items"], depth + 1), self._mark(self._style.get("item_separator", ","))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        items = f"({item} ({comma} {item}){more}){'' if least else '?'}" if most != 0 else '""'
        return f"{self._mark('[', before=False)} {items} {self._mark(']', after=False)}"

    def _mark(self, mark: str, *, before: bool = True, after: bool = True) -> str:
        space = f"({self._space})" if self._space else ""
        return f"/{space if before else ''}{re.escape(mark)}{space if after else ''}/"

    def _alone(self, schema: Any) -> Any:
        """Return ``schema`` with the definitions that it needs."""
        if not isinstance(schema, dict):
            return {"allOf": [schema]}
        alone = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        kept: dict[str, dict[str, Any]] = {}
        waiting: list[Any] = [alone]
        while waiting:
            value = waiting.pop()
            waiting += _parts(value)
            self._spend(1)
            if isinstance(value, dict) and isinstance(value.get("$ref"), str):
                _, *path = unquote(value["$ref"]).split("/")
                if len(path) < 2 or path[0] not in _DEFINITIONS:
                    raise self._problem
                name = path[1].replace("~1", "/").replace("~0", "~")
                if name not in kept.setdefault(path[0], {}):
                    kept[path[0]][name] = found = target(self._root, "/".join(["#", *path[:2]]))
                    waiting.append(found)
        return alone | kept


def of_json_schema(schema: dict[str, Any] | bool) -> str:
    """A grammar for JSON that a schema describes. Raises :class:`GrammarTextError` for numbers that cannot be enforced exactly."""
    try:
        expression = json_of(schema, {"whitespace_pattern": WHITESPACE})
    except (InexactNumber, RecursionError) as error:
        raise GrammarTextError(str(error)) from None
    if expression.startswith("%json "):
        return f'{{"grammars":[{{"json_schema":{expression.removeprefix("%json ")}}}]}}'
    return f"start: {expression}"


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
        return _with_schemas(any_to_lark(text))
    except RecursionError:
        raise GrammarTextError("it is nested too deeply") from None
    except Exception as error:  # the library raises bare Exception
        raise GrammarTextError(str(error)) from None


_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|(%json)\s*')
"""Strings, regular expressions and comments of Lark, in which ``%json`` is text, and ``%json`` before a schema."""


def _with_schemas(grammar: str) -> str:
    """Return a grammar in Lark with its schemas as :func:`of_json_schema` reads them. Raises ValueError."""
    pieces, at = [], 0
    while found := _LARK.search(grammar, at):
        pieces.append(grammar[at : found.end()])
        at = found.end()
        if found[1]:
            schema, at = json.JSONDecoder().raw_decode(grammar, at)
            pieces[-1] = pieces[-1][: found.start() - found.end()]
            pieces.append(json_of(schema, {"whitespace_pattern": WHITESPACE}))
    return "".join([*pieces, grammar[at:]])


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
    """Return the constraint of ``request``, if any. Raises :class:`InvalidRequest` for several that differ: guidance sends one in
    the forms of old and new versions of vLLM."""
    found = [OutputConstraint(kind, value, name) for name, kind in _FORMS.items() if (value := getattr(request, name)) is not None]
    if (constraint := _of_response_format(request)) is not None:
        found.append(constraint)
    if request.structured_outputs is not None:
        found.append(_of_structured_outputs(request.structured_outputs))
    for other in found[1:]:
        if (other.kind, other.value) != (found[0].kind, found[0].value):
            names = f"`{found[0].param}` and `{other.param}`"
            raise InvalidRequest(f"{names} both constrain the output; send one of them.", param=other.param)
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


COMPILE_SECONDS = GRAMMAR_BOUNDS.seconds / 2
"""Most CPU time that one grammar takes. Engines allow twice as much, so that they refuse none that passed."""
NICE = 5
"""Compiling processes leave the processors to other requests."""

STACK_BYTES = 1 << 20
"""Stack of the compiling process. Threads of engines have more."""
MAX_PROBLEM_BYTES = 1 << 15
"""Longest problem that is reported; a pipe holds it."""
_SLOW = f"compiling takes longer than {COMPILE_SECONDS:g} s; send a simpler one"
_CRASHED = "it cannot be compiled; send a simpler one"
_ENDED: dict[int, str] = {
    signal.SIGPROF: _SLOW,
    signal.SIGSEGV: "it is nested too deeply; send a simpler one",
    signal.SIGABRT: "compiling takes too much memory; send a simpler one",
}
"""Problems of grammars by the signal that ended the compiling process."""

_KEYWORDS = re.compile(r'Unimplemented keys: \["([^"\\]+)"')
_REWORDED = (
    (re.compile("NoExtensionBias"), "no text matches it, for example because a `$ref` leads only to itself"),
    (
        re.compile("Resource '(.*)' is not present in a registry.*"),
        r"the `$ref` to '\1' leads out of the schema; put that schema into `$defs`",
    ),
)
"""Errors of the library that do not say what is wrong, and the words for them."""


class GrammarCompiler:
    """Checks grammars for one tokeniser."""

    def __init__(self, tokens: list[bytes], control_ids: list[int], encode: Callable[[str], list[int]]) -> None:
        """``tokens``: bytes of every token; ``control_ids``: tokens that only a name in a grammar matches; ``encode``: text to
        token ids, without control tokens. Raises ValueError if the library cannot use the vocabulary."""
        end = len(tokens)  # an end-of-sequence token behind all others
        vocabulary = GrammarVocabulary(
            [*tokens, b"<end>"], [*control_ids, end], end, lambda text: encode(text.decode(errors="replace"))
        )
        try:
            self._vocabulary = LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        except BaseException as error:  # the library's panics are no Exception
            raise ValueError(str(error)) from error
        self._limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS._asdict())
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        """The problem of each grammar, empty if there is none, by the digest of the grammar."""

    def check(self, grammar: str, param: str) -> None:
        """Raise :class:`InvalidRequest` if engines cannot follow ``grammar``. ``param``: the field that it was made from."""
        digest = hashlib.sha256(grammar.encode()).digest()
        problem = self._problems.get(digest)
        if problem is None:
            problem = self._problem_of(grammar)
            self._problems[digest] = problem
            if len(self._problems) > GRAMMAR_BOUNDS.kept:
                self._problems.popitem(last=False)
        self._problems.move_to_end(digest)
        if problem:
            raise _refusal(problem, grammar, param)

    def _problem_of(self, grammar: str) -> str:
        """Return the problem of ``grammar``, which a child process finds or is ended by."""
        ours, theirs = os.pipe()
        arm = ending_with(os.getpid(), signal.SIGKILL, 1)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                if arm is not None:
                    arm()
                os.nice(NICE)
                signal.setitimer(signal.ITIMER_PROF, 2 * COMPILE_SECONDS)
                resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
                os.write(theirs, self._compiled(grammar).encode()[:MAX_PROBLEM_BYTES])
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            problem = pipe.read().decode(errors="ignore")
        _, status = os.waitpid(pid, 0)
        return _ENDED.get(os.WTERMSIG(status), _CRASHED) if status else problem

    def _compiled(self, grammar: str) -> str:
        """Compile ``grammar`` and return its problem, empty if there is none."""
        began = time.process_time()
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error().strip() or _CRASHED
        return _SLOW if time.process_time() - began > COMPILE_SECONDS else ""


def _refusal(problem: str, grammar: str, param: str) -> InvalidRequest:
    """Name the problem, and the place of a keyword of a schema that is not supported."""
    reason = " ".join(problem.replace("<non-verbose/>", "").split()).rstrip(".")
    for expression, words in _REWORDED:
        reason = expression.sub(words, reason)
    found = _KEYWORDS.match(problem)
    if found is None or not grammar.startswith("{"):
        return InvalidRequest(f"`{param}` cannot be followed: {reason}.", param=param)
    schemas = [each["json_schema"] for each in msgspec.json.decode(grammar)["grammars"] if "json_schema" in each]
    place = next(_places(schemas[0], found[1], param), param) if len(schemas) == 1 else param
    return InvalidRequest(f"`{place}`: the keyword `{found[1]}` is not supported.", param=place)


def _places(schema: dict[str, Any], keyword: str, path: str) -> Iterator[str]:
    """Paths of the objects in ``schema`` that have ``keyword``. The schema's nesting is bounded."""
    level: list[tuple[str, Any]] = [(path, schema)]
    while level:
        for place, value in level:
            if isinstance(value, dict) and keyword in value and place.rpartition(".")[2] not in _NAMED:
                yield place
        level = [(f"{place}.{key}", part) for place, value in level if isinstance(value, dict) for key, part in value.items()] + [
            (f"{place}[{index}]", part) for place, value in level if isinstance(value, list) for index, part in enumerate(value)
        ]
