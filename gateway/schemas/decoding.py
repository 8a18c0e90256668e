"""JSON bodies in: one typed decode, errors that say what and where, and the names of the fields that were ignored."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from gateway.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")


class BodyDecoder(Generic[T]):
    """Decodes bodies of one type."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(kind))

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request and the top-level fields that it does not know. Raises :class:`InvalidRequest`."""
        if not body:
            raise InvalidRequest("The request body is empty; send a JSON object.")
        try:
            request = self._decoder.decode(body)
            ignored = [name for name in _members.decode(body) if name not in self._known]
        except msgspec.ValidationError as error:
            raise _located(str(error)) from None
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The request body is not valid JSON: {_reason(body, error)}.") from None
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


def _located(message: str) -> InvalidRequest:
    """``Expected `int`, got `str` - at `$.items[3]``` as an error whose ``param`` is ``items[3]``."""
    found = _AT.search(message)
    if found is None:
        missing = re.search(r"missing required field `(.+?)`", message)
        return InvalidRequest(f"{message}.", param=missing[1] if missing else None)
    where = found["path"]
    what = message[: found.start()]
    subject = f"A key of `{where}`" if found["key"] else f"`{where}`"
    return InvalidRequest(f"{subject}: {what[:1].lower()}{what[1:]}.", param=where)
