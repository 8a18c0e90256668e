"""JSON bodies in: one typed decode, errors that say what and where, and the names of the fields that were ignored."""

from __future__ import annotations

import re
from types import NoneType
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec import inspect

from gateway.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_inner_members = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_AT = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`$")
_KEY_BEFORE = re.compile(rb'"([^"\\]+)"\s*:\s*-?$')


class BodyDecoder(Generic[T]):
    """Decodes bodies of one type."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        self._known = _names(kind)
        objects = {field.encode_name: _object(field.type) for field in msgspec.structs.fields(kind)}
        self._objects = {name: _names(inner) for name, inner in objects.items() if inner is not None}

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request and the fields that it does not know, at the top and in objects there. Raises :class:`InvalidRequest`."""
        if not body:
            raise InvalidRequest("The request body is empty; send a JSON object.")
        try:
            request = self._decoder.decode(body)
            members = _members.decode(body)
            ignored = [name for name in members if name not in self._known]
            for name in self._objects.keys() & members.keys():
                inner = _inner_members.decode(members[name]) or {}
                ignored += [f"{name}.{key}" for key in inner if key not in self._objects[name]]
        except msgspec.ValidationError as error:
            raise _located(str(error), self._kind) from None
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The request body is not valid JSON: {_reason(body, error)}.", param=_key(body, error)) from None
        except UnicodeDecodeError:
            raise InvalidRequest("The request body is not valid UTF-8; encode it as UTF-8.") from None
        except RecursionError:
            raise InvalidRequest("The request body is nested too deeply.") from None
        return request, ignored


def _reason(body: bytes, error: msgspec.DecodeError) -> str:
    """msgspec's reason, unless the bytes are not even text."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    reason = str(error).removeprefix("JSON is malformed: ")
    return f"{reason[:1].lower()}{reason[1:]}" + ("; JSON has no NaN or Infinity" if "invalid character" in reason else "")


def _key(body: bytes, error: msgspec.DecodeError) -> str | None:
    """The key whose value cannot be read, where it is the value that is at fault (NaN, say)."""
    at = re.search(r"invalid character \(byte (\d+)\)$", str(error))
    found = _KEY_BEFORE.search(body, max(0, int(at[1]) - 100), int(at[1])) if at else None
    return found[1].decode(errors="replace") if found else None


def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def _object(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct that a field holds, unless it holds other things or knows no ignored fields."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    open_struct = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], msgspec.Struct)
    return kinds[0] if open_struct and not kinds[0].__struct_config__.forbid_unknown_fields else None


def _located(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    """``Expected `int`, got `str` - at `$.items[3]``` as an error whose ``param`` is ``items[3]``."""
    found = _AT.search(message)
    if found is None:
        missing = re.search(r"missing required field `(.+?)`", message)
        return InvalidRequest(f"{message}.", param=missing[1] if missing else None)
    where = found["path"]
    what = message[: found.start()]
    if unknown := _UNKNOWN.match(what):
        return InvalidRequest(f"`{where}` has no field `{unknown[1]}`.", param=f"{where}.{unknown[1]}")
    if what.startswith("Invalid enum value"):
        what += f"; it is one of {', '.join(_words(inspect.type_info(kind), _STEP.findall(where)))}"
    subject = f"A key of `{where}`" if found["key"] else f"`{where}`"
    return InvalidRequest(f"{subject}: {what[:1].lower()}{what[1:]}.", param=where)


def _words(kind: inspect.Type, path: list[str]) -> list[str]:
    """The words that may stand at ``path`` in a ``kind``."""
    if isinstance(kind, inspect.UnionType):
        return [word for part in kind.types for word in _words(part, path)]
    if not path:
        return [f"'{word}'" for word in kind.values] if isinstance(kind, inspect.LiteralType) else []
    if isinstance(kind, inspect.StructType):
        return [word for field in kind.fields if field.encode_name == path[0] for word in _words(field.type, path[1:])]
    return _words(kind.item_type, path[1:]) if isinstance(kind, inspect.ListType) else []
