"""One request and its response on a connection."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.errors import GatewayError

INCOMING = "yardstick.incoming"
"""The key of the :class:`Incoming` in a scope."""


class Incoming:
    """A request as it arrives. Scopes refer to this, not to the :class:`Cycle`, which refers to the scope: reference cycles would
    keep bodies until the next garbage collection."""

    __slots__ = ("complete", "headers")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = dict(headers)
        """The headers by their lower-case names; several of one name are joined by commas."""
        if len(self.headers) != len(headers):
            self.headers = _joined(headers)
        self.complete = False
        """Whether the whole body has arrived."""

    @staticmethod
    def of(scope: Scope) -> Incoming:
        """What arrives for ``scope``. Every scope of our protocol has it."""
        incoming: Incoming = scope[INCOMING]  # type: ignore[literal-required]
        return incoming


class Cycle(RequestResponseCycle):
    """uvicorn's, whose body can fail. Every ``receive`` after that raises."""

    failure: GatewayError | None = None
    """Why the rest of the body will not be read."""

    def fail(self, error: GatewayError) -> None:
        """Raise ``error`` from ``receive``, and close after the response."""
        self.failure = error
        self.keep_alive = False
        self.message_event.set()

    def receive(self) -> Coroutine[Any, Any, Any]:
        """The ASGI ``receive``. Raises :class:`InvalidRequest` where the body is not valid HTTP, and :class:`RequestTimeout`."""
        return RequestResponseCycle.receive(self) if self.failure is None else self._raise(self.failure)

    async def _raise(self, error: GatewayError) -> Any:
        raise error


def _joined(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    joined: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        joined.setdefault(name, []).append(value)
    return {name: b", ".join(values) for name, values in joined.items()}
