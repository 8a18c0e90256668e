"""Decodes JSON bodies: one typed decode, errors that name problem and field, and the names of ignored fields.

A decoder that refuses unknown fields decodes each body. Only if it meets one, the body is decoded again, leniently, and searched
for unknown names. A body longer than ``SEARCHED_BYTES`` is decoded leniently at once and is not searched; of its ignored fields,
only those in :data:`gateway.schemas.parameters.IGNORED` are named.

**Misspelt and misplaced fields.** An unknown name is refused if it is nearly that of a known field, or that of a field of an object
that refuses unknown ones (such as ``length_guidance``), and the value fits that field. Other unknown names are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec import inspect

from gateway.errors import InvalidRequest
from gateway.schemas.parameters import IGNORED, REFUSED, Parameters, Refused
from gateway.schemas.variants import variant

SEARCHED_BYTES = 64 << 10
"""Longest body that is searched for unknown fields. The second decoding and the search take at most 3 ms."""
MAX_IGNORED = 32
"""Most names that are returned."""
MIN_NAME = 8
"""Fewest characters of a name with a wrong character. Shorter names of other servers are too near to ours."""
_MAX_ACCEPTED_BYTES = 64
"""Longest JSON of a value that is compared with :attr:`Refused.accepts`; a longer one is not decoded."""

T = TypeVar("T", bound=Parameters)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`")
_KEY_BEFORE = re.compile(rb'"([^"\\]+)"\s*:\s*-?$')


class BodyDecoder(Generic[T]):
    """Decodes bodies of one type. An instance keeps no state of a request and does not depend on HTTP."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        declared = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        self._refused = {row.name: row for row in REFUSED if kind.endpoint in row.endpoints and row.name not in declared}
        ignored = [row.name for row in IGNORED if kind.endpoint in row.endpoints and row.name not in declared]
        self._extras = (*self._refused, *ignored)
        assert len(set(self._extras)) == len(self._extras), "a parameter has one row for each endpoint"
        self._known = declared.keys() | set(self._extras)
        self._declared = declared
        self._own = {
            field.encode_name: (f"{name}.{field.encode_name}", field.type)
            for name, type in declared.items()
            for own in _own_objects(type)
            for field in msgspec.structs.fields(own)
            if field.encode_name not in self._known
        }
        """Fields of the objects that refuse unknown ones: path and type of each."""
        types = {field.encode_name: field.type for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        self._shapes = {name: shape for name, type in types.items() if (shape := _shape(type))}
        self._strict = msgspec.json.Decoder(variant(kind, strict=True))
        self._lenient = msgspec.json.Decoder(variant(kind, self._extras, strict=False))

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """Return the request and the names of ignored fields, at most ``MAX_IGNORED``. Raises :class:`InvalidRequest`."""
        if not body:
            raise InvalidRequest("The request body is empty; send a JSON object.")
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            raise _located(str(error), self._kind) from None
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The request body is not valid JSON: {_reason(body, error)}.", param=_key(body, error)) from None
        except UnicodeDecodeError:
            raise InvalidRequest("The request body is not valid UTF-8; encode it as UTF-8.") from None
        except RecursionError:
            raise InvalidRequest("The request body is nested too deeply.") from None

    def _decode(self, body: bytes) -> tuple[Any, list[str]]:
        searched = len(body) <= SEARCHED_BYTES
        if searched:
            try:
                return self._strict.decode(body), []
            except msgspec.ValidationError as error:
                if not _UNKNOWN.match(str(error)):
                    raise
        given = self._lenient.decode(body)
        ignored = self._unsupported(given)
        request = self._kind(**{name: getattr(given, name) for name in self._kind.__struct_fields__})
        if searched:
            ignored += self._search(body)
        elif self._own:
            self._check_names(_members.decode(body))
        return request, ignored[:MAX_IGNORED]

    def _check_names(self, members: dict[str, msgspec.Raw]) -> None:
        """Raise :class:`InvalidRequest` for a misspelt or misplaced field. members: fields of the body."""
        for name in islice((name for name in members if name not in self._known), MAX_IGNORED):
            if name in self._own:
                path, type = self._own[name]
            else:
                path = nearest(name, (*self._declared, *self._own)) or ""
                path, type = self._own.get(path, (path, self._declared.get(path)))
            if path and _fits(members[name], type):
                raise InvalidRequest(f"There is no field `{name}`; did you mean `{path}`?", param=name)

    def _unsupported(self, request: msgspec.Struct) -> list[str]:
        """Return the ignored fields of the tables. Raises :class:`InvalidRequest` for a refused field."""
        values = ((name, getattr(request, name)) for name in self._extras)
        given = [(name, raw) for name, raw in values if raw is not msgspec.UNSET]
        for name, raw in given:
            if name in self._refused and not _accepted(self._refused[name], raw):
                raise InvalidRequest(self._refused[name].message, param=name)
        return [name for name, _ in given if name not in self._refused]

    def _search(self, body: bytes) -> dict[str, None]:
        """Return the paths of unknown fields, those at the top level first. Fields that hold no objects are not decoded."""
        members = _members.decode(body)
        self._check_names(members)
        found = dict.fromkeys(islice((name for name in members if name not in self._known), MAX_IGNORED))
        for name, raw in members.items():
            if name in self._shapes:
                _find_unknown(self._shapes[name], msgspec.json.decode(raw), name, found)
        return found


def _own_objects(annotation: Any) -> Iterator[Any]:
    """Yield the structs in ``annotation``, outside of lists, that refuse unknown fields."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        if annotation.__struct_config__.forbid_unknown_fields:
            yield annotation
    elif getattr(annotation, "__origin__", None) not in (list, dict):
        for part in get_args(annotation):
            yield from _own_objects(part)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that ``name`` is but for case, `_`, `-` and one wrong, missing, added or exchanged character;
    None if there is none."""
    plain = _plain(name)
    long = len(plain) >= MIN_NAME
    return next((each for each in known if (other := _plain(each)) == plain or (long and _is_one_edit(plain, other))), None)


def _is_one_edit(one: str, other: str) -> bool:
    if abs(len(one) - len(other)) > 1:
        return False
    at = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left, right = one[at:], other[at:]
    swapped = left[:2] == right[:2][::-1] and left[2:] == right[2:]
    return left[1:] == right[1:] or left == right[1:] or left[1:] == right or swapped


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _fits(raw: msgspec.Raw, type: Any) -> bool:
    """Whether the JSON ``raw`` is a value of ``type``, or an object in place of one, and not null."""
    if bytes(memoryview(raw)[:1]) == b"{":
        return _shape(inspect.type_info(type)) is not None
    try:
        return msgspec.json.decode(raw, type=type) is not None
    except (msgspec.ValidationError, RecursionError):
        return False


def _accepted(row: Refused, raw: msgspec.Raw) -> bool:
    """Whether the JSON ``raw`` requests the behaviour that the server has anyway."""
    if memoryview(raw).nbytes > _MAX_ACCEPTED_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or value in row.accepts


@dataclass(frozen=True)
class _Shape:
    """The places of a value in which unknown fields may occur."""

    fields: dict[str, _Shape | None] | None = None
    """For an object: its known fields, and the shapes of those that hold objects."""
    items: _Shape | None = None
    """For a list: the shape of its items."""


def _shape(kind: inspect.Type) -> _Shape | None:
    """Return the shape of ``kind``; None if a value of it holds no objects with known fields."""
    if isinstance(kind, inspect.StructType):
        tag: dict[str, _Shape | None] = {} if kind.tag_field is None else {kind.tag_field: None}
        return _Shape(tag | {field.encode_name: _shape(field.type) for field in kind.fields})
    if isinstance(kind, inspect.ListType):
        items = _shape(kind.item_type)
        return items and _Shape(items=items)
    parts = [shape for part in kind.types if (shape := _shape(part))] if isinstance(kind, inspect.UnionType) else []
    if not parts:
        return None
    fields = dict(pair for part in parts if part.fields is not None for pair in part.fields.items())
    return _Shape(fields or None, next((part.items for part in parts if part.items is not None), None))


def _find_unknown(shape: _Shape, value: Any, path: str, found: dict[str, None]) -> None:
    """Add paths of unknown fields in ``value``, up to :data:`MAX_IGNORED`. Positions are left out: ``messages[].foo``."""
    if isinstance(value, list) and shape.items is not None:
        for inner in value:
            _find_unknown(shape.items, inner, f"{path}[]", found)
    elif isinstance(value, dict) and shape.fields is not None:
        for name, inner in value.items():
            if len(found) >= MAX_IGNORED:
                return
            if name not in shape.fields:
                if "." not in path and "[" not in path and inner is not None and (near := nearest(name, shape.fields)):
                    message = f"`{path}` has no field `{name}`; did you mean `{path}.{near}`?"
                    raise InvalidRequest(message, param=f"{path}.{name}")
                found[f"{path}.{name}"] = None
            elif (below := shape.fields[name]) is not None:
                _find_unknown(below, inner, f"{path}.{name}", found)


def _reason(body: bytes, error: msgspec.DecodeError) -> str:
    """Return msgspec's reason, unless the bytes are not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    reason = str(error).removeprefix("JSON is malformed: ")
    return f"{reason[:1].lower()}{reason[1:]}" + ("; JSON has no NaN or Infinity" if "invalid character" in reason else "")


def _key(body: bytes, error: msgspec.DecodeError) -> str | None:
    """Return the key of a value that is not valid JSON, such as NaN; None for other errors."""
    at = re.search(r"invalid character \(byte (\d+)\)$", str(error))
    found = _KEY_BEFORE.search(body, max(0, int(at[1]) - 100), int(at[1])) if at else None
    return found[1].decode(errors="replace") if found else None


def _located(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    """Convert ``Expected `int`, got `str` - at `$.items[3]``` to an error whose ``param`` is ``items[3]``."""
    found = _AT.search(message)
    if found is None:
        missing = re.search(r"missing required field `(.+?)`", message)
        return InvalidRequest(f"{message}.", param=missing[1] if missing else None)
    where = found["path"]
    what = message[: found.start()]
    if unknown := _UNKNOWN.match(what):
        near = nearest(unknown[1], _names(inspect.type_info(kind), _STEP.findall(where)))
        hint = f"; did you mean `{where}.{near}`?" if near else "."
        return InvalidRequest(f"`{where}` has no field `{unknown[1]}`{hint}", param=f"{where}.{unknown[1]}")
    if what.startswith("Expected `null`, got"):
        return InvalidRequest(f"`{where}` is not supported; leave it out.", param=where)
    if what.startswith(("Invalid enum value", "Invalid value")):
        what += f"; it is one of {', '.join(_words(inspect.type_info(kind), _STEP.findall(where)))}"
    subject = f"A key of `{where}`" if found["key"] else f"`{where}`"
    return InvalidRequest(f"{subject}: {what[:1].lower()}{what[1:]}.", param=where)


def _names(kind: inspect.Type, path: list[str]) -> list[str]:
    """Return the names of the fields of the object at ``path`` in a ``kind``."""
    if isinstance(kind, inspect.UnionType):
        return [name for part in kind.types for name in _names(part, path)]
    if isinstance(kind, inspect.StructType):
        if not path:
            return [field.encode_name for field in kind.fields]
        return [name for field in kind.fields if field.encode_name == path[0] for name in _names(field.type, path[1:])]
    return _names(kind.item_type, path[1:]) if path and isinstance(kind, inspect.ListType) else []


def _words(kind: inspect.Type, path: list[str]) -> list[str]:
    """Return the allowed words at ``path`` in a ``kind``."""
    if isinstance(kind, inspect.UnionType):
        return [word for part in kind.types for word in _words(part, path)]
    if not path:
        return [f"'{word}'" for word in kind.values] if isinstance(kind, inspect.LiteralType) else []
    if isinstance(kind, inspect.StructType):
        if kind.tag_field == path[0]:
            return [f"'{kind.tag}'"]
        return [word for field in kind.fields if field.encode_name == path[0] for word in _words(field.type, path[1:])]
    return _words(kind.item_type, path[1:]) if isinstance(kind, inspect.ListType) else []
