"""Stored responses, as routes use them: bounds and errors for clients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.connection import ASGIConnection

from gateway.errors import InvalidRequest, ResponseNotFound, StoreUnavailable
from gateway.http.context import RequestContext
from gateway.ops.metrics import Telemetry
from gateway.responses.store import ResponseStore, Stored, Unavailable
from gateway.schemas.response_body import OutputItem, OutputMessage
from gateway.text.prepared import Items

_ID = re.compile(r"resp_[0-9a-f]{32}")
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Kept:
    """The stored responses of all API keys."""

    store: ResponseStore
    telemetry: Telemetry
    stores: bool
    """Whether the server stores responses."""
    most_bytes: int
    """Most bytes of the conversation before a response that is stored."""

    def check(self) -> None:
        """Raise :class:`InvalidRequest` if the server stores no responses, :class:`StoreUnavailable` if it cannot at present."""
        if not self.stores:
            raise InvalidRequest(
                "This server stores no responses; send `store` as false, and the whole conversation.", param="store"
            )
        try:
            self.store.check()
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
        try:
            found = await self.store.get(_tenant(connection), id) if _ID.fullmatch(id) else None
        except Unavailable:
            raise _unavailable() from None
        if found is None:
            raise _unknown(id, param)
        return found

    async def remove(self, connection: ASGIConnection, id: str) -> None:  # type: ignore[type-arg]
        """Remove a response of the client's key. Raises as :meth:`find`."""
        try:
            found = await self.store.delete(_tenant(connection), id) if _ID.fullmatch(id) else False
        except Unavailable:
            raise _unavailable() from None
        if not found:
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
        try:
            stored = await self.store.put(_tenant(connection), id, Stored(body, context, items))
        except Unavailable:
            stored = False
        self.telemetry.stored_responses.labels("stored" if stored else "dropped").inc()
        return stored


def _plain(item: OutputItem) -> OutputItem:
    """Return ``item`` as the input of a later request: without log-probabilities."""
    if not isinstance(item, OutputMessage):
        return item
    content: list[Any] = [msgspec.structs.replace(part, logprobs=[]) for part in item.content]
    return msgspec.structs.replace(item, content=content)


def _tenant(connection: ASGIConnection) -> str:  # type: ignore[type-arg]
    """Return the owner of a client's responses: its API key. Without keys there is one owner."""
    key = RequestContext.of(connection).key
    return "" if key is None else key.id


def _unknown(id: str, param: str | None) -> ResponseNotFound:
    message = f"The response {id[:64]!r} is not stored here: it was not stored, has expired, was deleted, or is another key's."
    return ResponseNotFound(message, param=param)


def _unavailable() -> StoreUnavailable:
    message = "Responses cannot be stored or read at present; try again, or send the whole conversation without `store`."
    return StoreUnavailable(message, retry_after=1)
