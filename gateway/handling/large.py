"""JSON responses. Those with long lists are built and encoded in slices, so that the event loop serves others in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.response import Stream
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from gateway.process.time_slices import TimeSlice

T = TypeVar("T", bound=msgspec.Struct)
C = TypeVar("C")

PART_BYTES = 1 << 16
"""Bytes of a large response after which a new part begins; each part is sent separately."""

_encoder = msgspec.json.Encoder()


class JsonResponse(Response[C]):
    """A response with ``content`` as JSON. It takes a fifth of the function calls of the framework's own."""

    def __init__(self, content: C, headers: Mapping[str, str] | None = None, *, status: int = 200) -> None:
        self.content = content
        self.headers = dict(headers or {})
        self._status = status

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """Return the ASGI response that the framework sends."""
        return _ASGIJson(_encoder.encode(self.content), self.headers, self._status)


class _ASGIJson(ASGIResponse):
    def __init__(self, body: bytes, headers: Mapping[str, str], status: int) -> None:
        self.body = body
        self._status = status
        self._fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self._fields += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send the response."""
        await send({"type": "http.response.start", "status": self._status, "headers": self._fields})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


async def with_rows(
    answer: T, name: str, rows: Iterable[object], *, large: bool, headers: Mapping[str, str] | None = None
) -> Response[Any]:
    """Return a response with ``rows`` in place of the empty list in the field ``name`` of ``answer``. ``large``: building and
    encoding the rows takes more than a millisecond."""
    if not large:
        return JsonResponse(msgspec.structs.replace(answer, **{name: list(rows)}), headers)
    return _in_parts(await _filled(answer, {name: rows}), headers)


async def with_lists(answer: msgspec.Struct, lists: Mapping[str, Iterable[object]], *, headers: Mapping[str, str]) -> Response[Any]:
    """Return a response with each of ``lists`` in place of the empty list of that name in ``answer``, encoded in slices."""
    return _in_parts(await _filled(answer, lists), headers)


async def event_with_rows(answer: msgspec.Struct, name: str, rows: Iterable[object]) -> bytes:
    """Return ``answer`` as a server-sent event, with ``rows`` in place of the empty list in its field ``name``."""
    return b"data: %b\n\n" % b"".join(await _filled(answer, {name: rows}))


async def _filled(answer: msgspec.Struct, lists: Mapping[str, Iterable[object]]) -> list[bytes]:
    parts, rest = [], _encoder.encode(answer)
    for _, name in sorted((rest.index(b'"%b":[]' % name.encode()), name) for name in lists):
        before, rest = rest.split(b'"%b":[]' % name.encode(), 1)
        parts += await _parts(before + b'"%b":[' % name.encode(), lists[name], b"]")
    return [*parts, rest]


async def listed(rows: Iterable[object], *, large: bool, headers: Mapping[str, str] | None = None) -> Response[Any]:
    """Return a response that is a list of ``rows``; see :func:`with_rows`."""
    if not large:
        return JsonResponse(list(rows), headers)
    return _in_parts(await _parts(b"[", rows, b"]"), headers)


async def _parts(before: bytes, rows: Iterable[object], after: bytes) -> list[bytes]:
    """Encode ``rows`` in slices."""
    parts, part, time_slice = [], bytearray(before), TimeSlice()
    separator = b""
    for row in rows:
        part += separator + _encoder.encode(row)
        separator = b","
        if len(part) > PART_BYTES:
            parts.append(bytes(part))
            part.clear()
        if time_slice.over:
            await time_slice.yield_to_loop()
    return [*parts, bytes(part) + after]


def encoded(body: bytes | memoryview) -> Response[Any]:
    """Return a response with ``body``, which is JSON already. Its parts are views, because copying megabytes takes milliseconds."""
    view = memoryview(body)
    return _in_parts([view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)], None)


def _in_parts(parts: Sequence[bytes | memoryview], headers: Mapping[str, str] | None) -> Response[Any]:
    """Return a response that sends ``parts`` one after another."""

    async def each() -> AsyncIterator[bytes]:
        for part in parts:
            yield bytes(part)
            await asyncio.sleep(0)  # the transport joins writes of one event loop iteration

    length = str(sum(map(len, parts)))
    return Stream(each(), media_type="application/json", headers={**(headers or {}), "content-length": length})
