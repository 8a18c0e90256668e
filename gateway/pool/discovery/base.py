"""Interface between the pool and a source of endpoints."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec


class Endpoint(msgspec.Struct, frozen=True, order=True):
    """Address of one engine."""

    url: str
    draining: bool = False
    """The engine is terminating: open requests may finish, new ones go elsewhere."""


class Discovery(Protocol):
    """A source of endpoints."""

    def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """Yield all endpoints, first the current ones and then after every change, without end. Raises nothing: a source that fails
        is asked again later, and the last result stays valid until then."""
        ...


class Backoff:
    """Waiting times that double up to a limit, with jitter so that gateways do not retry at the same moment."""

    def __init__(self, shortest: float, longest: float) -> None:
        """``shortest`` and ``longest`` are nominal times in seconds."""
        self._shortest, self._longest = shortest, longest
        self._next = shortest

    def reset(self) -> None:
        """Start again with the shortest time, after a success."""
        self._next = self._shortest

    def wait(self) -> float:
        """Return the next waiting time in seconds: 0.5 to 1.5 times the nominal time."""
        nominal, self._next = self._next, min(2 * self._next, self._longest)
        return nominal * random.uniform(0.5, 1.5)


def http_url(host: str, port: int) -> str:
    """Return the base URL of an engine; ``host`` may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
