"""One request and its response on a connection."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.errors import GatewayError

NOTED = frozenset(
    {
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"content-type",
        b"content-length",
        b"content-encoding",
        b"transfer-encoding",
        b"expect",
    }
)
"""Headers that the edge reads: they are found once, while the head is parsed."""
INCOMING = "yardstick.incoming"
"""The key of the :class:`Incoming` in a scope."""


class Incoming:
    """A request as it arrives. Scopes refer to this, not to the :class:`Cycle`, which refers to the scope: reference cycles would
    keep bodies until the next garbage collection."""

    __slots__ = ("complete", "noted")

    def __init__(self, noted: dict[bytes, bytes]) -> None:
        self.noted = noted
        """The request's headers of :data:`NOTED`; several of one name are joined by commas."""
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
