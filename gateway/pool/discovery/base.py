"""What the pool needs of a source of endpoints."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec


class Endpoint(msgspec.Struct, frozen=True, order=True):
    """Where an engine listens."""

    url: str
    draining: bool = False
    """It is about to end: what runs there may finish, nothing new is sent."""


class Discovery(Protocol):
    """A source of endpoints."""

    def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """All endpoints there are, now and after every change, for ever. Raises nothing: where the source cannot be asked it is
        asked again later, and until then the last answer holds."""
        ...


class Backoff:
    """Waits that double up to a limit, with jitter so that gateways do not ask all at once."""

    def __init__(self, shortest: float, longest: float) -> None:
        """In seconds."""
        self._shortest, self._longest = shortest, longest
        self._next = shortest

    def reset(self) -> None:
        """It went well."""
        self._next = self._shortest

    def wait(self) -> float:
        """Seconds to wait this time: half to one and a half of the nominal time."""
        nominal, self._next = self._next, min(2 * self._next, self._longest)
        return nominal * random.uniform(0.5, 1.5)


def http_url(host: str, port: int) -> str:
    """The base URL of an engine; ``host`` may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
