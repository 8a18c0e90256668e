"""Stored responses. They belong to API keys, and a key sees its own responses only.

When the bound on entries is reached, the key with most responses loses its oldest ones first, and when that on bytes is reached,
the key with most bytes. So no key can displace the responses of one that stores less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.connection import ASGIConnection

from gateway.errors import InvalidRequest, ResponseNotFound, StoreUnavailable
from gateway.http.context import RequestContext
from gateway.ops.metrics import Telemetry
from gateway.schemas.response_body import OutputItem, OutputMessage
from gateway.settings import Settings
from gateway.store.base import Full, Missing, Space, Store, Unavailable
from gateway.text.prepared import Items

STORED_RESPONSES = 10_000
"""Most stored responses; beyond it, the oldest of the API key with most responses are removed."""
ENTRY_BYTES = 1024
"""Bytes that a response takes besides its contents."""
_ID = re.compile(r"resp_[0-9a-f]{32}")
_encoder = msgspec.json.Encoder()


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A stored response."""

    response: bytes
    """The response's body as JSON."""
    context: bytes
    """The items of the conversation up to this response, with its own: JSON values with commas between them."""
    input: Items
    """The items of the request."""


_decoder = msgspec.msgpack.Decoder(Stored)


def response_space(settings: Settings) -> Space:
    """Return the bounds of stored responses."""
    return Space(
        name="responses",
        bytes=settings.stored_responses_bytes,
        entries=STORED_RESPONSES if settings.stored_responses_bytes else 0,
        entry_bytes=ENTRY_BYTES,
        seconds=settings.stored_responses_seconds,
        evicts=True,
    )


@dataclass(frozen=True)
class Kept:
    """The stored responses of all API keys."""

    store: Store
    space: Space
    telemetry: Telemetry
    most_bytes: int
    """Most bytes of the conversation before a response that is stored."""

    async def check(self) -> None:
        """Raise :class:`InvalidRequest` if the server stores no responses, :class:`StoreUnavailable` if it cannot at present."""
        if not self.space.entries:
            raise InvalidRequest(
                "This server stores no responses; send `store` as false, and the whole conversation.", param="store"
            )
        try:
            await self.store.check()
        except Unavailable:
            raise _unavailable() from None

    def check_size(self, instructions: bytes, earlier: bytes, items: Items) -> None:
        """Raise :class:`InvalidRequest` if a conversation is too long to be stored."""
        size = len(instructions) + len(earlier) + len(items.content)
        if size > self.most_bytes:
            message = f"A conversation of {size} bytes cannot be stored; at most {self.most_bytes} can. Send `store` as false."
            raise InvalidRequest(message, param="store")

    async def find(self, connection: ASGIConnection, id: str, *, param: str | None = None) -> Stored:  # type: ignore[type-arg]
        """Return a response of the client's key. Raises :class:`ResponseNotFound`, :class:`StoreUnavailable`."""
        value = None
        try:
            if _ID.fullmatch(id):
                (value,) = (await self.store.get(self.space, _owner(connection), [id])).values
        except Missing:
            pass
        except Unavailable:
            raise _unavailable() from None
        if value is None:
            raise _unknown(id, param)
        return _decoder.decode(value)

    async def remove(self, connection: ASGIConnection, id: str) -> None:  # type: ignore[type-arg]
        """Remove a response of the client's key. Raises as :meth:`find`."""
        removed = 0
        try:
            if _ID.fullmatch(id):
                removed = await self.store.remove(self.space, _owner(connection), [id])
        except Missing:
            pass
        except Unavailable:
            raise _unavailable() from None
        if not removed:
            raise _unknown(id, None)

    async def keep(
        self,
        connection: ASGIConnection,  # type: ignore[type-arg]
        id: str,
        body: bytes,
        earlier: bytes,
        items: Items,
        output: list[OutputItem],
    ) -> bool:
        """Store a response whose body is ``body``. Return whether it is stored."""
        encoded = [_encoder.encode(_plain(item)) for item in output]
        context = b",".join([part for part in (earlier, items.content, *encoded) if part])
        value = msgspec.msgpack.encode(Stored(body, context, items))
        try:
            await self.store.put(self.space, _owner(connection), [(id, value)])
            stored = True
        except (Unavailable, Full):
            stored = False
        self.telemetry.stored_responses.labels("stored" if stored else "dropped").inc()
        return stored


def _plain(item: OutputItem) -> OutputItem:
    """Return ``item`` as the input of a later request: without log-probabilities."""
    if not isinstance(item, OutputMessage):
        return item
    content: list[Any] = [msgspec.structs.replace(part, logprobs=[]) for part in item.content]
    return msgspec.structs.replace(item, content=content)


def _owner(connection: ASGIConnection) -> str:  # type: ignore[type-arg]
    """Return the owner of a client's responses: its API key. Without keys there is one owner."""
    key = RequestContext.of(connection).key
    return "" if key is None else key.id


def _unknown(id: str, param: str | None) -> ResponseNotFound:
    message = f"The response {id[:64]!r} is not stored here: it was not stored, has expired, was deleted, or is another key's."
    return ResponseNotFound(message, param=param)


def _unavailable() -> StoreUnavailable:
    message = "Responses cannot be stored or read at present; try again, or send the whole conversation without `store`."
    return StoreUnavailable(message, retry_after=1)
