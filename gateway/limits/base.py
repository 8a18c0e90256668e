"""Limits of keys: data types, the accounting rules and the limiter protocol.

Requests, tokens and items per minute follow the *generic cell rate algorithm* (ITU-T I.371; a leaky bucket stored as one time). A
limit of ``n`` per minute lets ``n`` through at once after a minute of rest, and then one more every ``60 / n`` s. The only state of
a rate is the time at which its allowance is whole again: a cost moves the time ahead, and a refund moves it back. Reasons for this
algorithm instead of windows:

- One number per limit is cheap to store and to change atomically, in Redis as here.
- The allowance returns continuously: there is no burst at the start of each minute, and the waiting time is exact.
- The remaining allowance and its reset time, which the headers report, follow from the same number.

In the worst minute, which begins after a rest, twice the limit passes; over longer times the average approaches the limit.

A request takes its expected cost when it begins, in two steps if a text worker reads it, and is settled once, when it ends:
:func:`used` computes the final charge, and the difference from the expected cost is given back, or taken if more was used. Over any
time since the start, the final charges sum to at most the limit times the minutes, plus one limit.

Concurrency is a set of leases, one for each request in progress. A lease ends with its request; the leases of a gateway that died
expire.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import msgspec

RATES = ("requests", "tokens", "items")
"""Names of the rates, in the order of every tuple in this module."""
CONCURRENCY = "concurrency"
MINUTE = 60.0
BUSY_SECONDS = 1.0
"""Retry-After if the concurrency limit is reached; the real wait is unknown."""


class Limits(NamedTuple):
    """Limits of one key; None is no limit."""

    rates: tuple[int | None, int | None, int | None] = (None, None, None)
    """Limits per minute, in the order of :data:`RATES`."""
    concurrency: int | None = None

    @property
    def any(self) -> bool:
        """Whether the key has any limit."""
        return self.concurrency is not None or self.rates != (None, None, None)


class Cost(NamedTuple):
    """Cost of one request in each rate."""

    requests: int
    tokens: int
    items: int


NOTHING = Cost(0, 0, 0)
CLIENT_GONE = 499
"""Status of a request whose client left before an answer began."""


class Level(NamedTuple):
    """Remaining allowance of one rate."""

    limit: int
    """Limit per minute."""
    remaining: int
    reset: float
    """Seconds until the whole allowance is available."""


class Verdict(NamedTuple):
    """Result of :meth:`Limiter.take`."""

    denied: str | None
    """The limit that denies the request: one of :data:`RATES` or :data:`CONCURRENCY`. Nothing is taken then. None if allowed."""
    wait: float
    """Seconds until the request fits; infinite if it never fits."""
    levels: tuple[Level | None, Level | None, Level | None]
    """State of each rate after this request."""


class Lease(msgspec.Struct, eq=False):
    """The share of the limits that one request takes; it is settled when the request ends."""

    owner: str
    """Id of the key."""
    id: str
    limits: Limits
    cost: Cost
    """Expected cost, taken when the request begins."""
    used_tokens: int | None = None
    """Tokens used by an answered request; None means the expected number."""
    begun: Cost = NOTHING
    """Cost of the messages that were sent to engines so far."""
    charged: Cost | None = None
    """Final cost; None until the request has ended."""
    read: bool = False
    """Whether it was taken before a text worker read the request."""
    fetched: bool = False
    """Whether images were fetched for the request."""
    shared: bool = False
    """Whether Redis granted the lease."""
    _messages: set[str] = msgspec.field(default_factory=set)
    """Ids of the messages in :attr:`begun`."""

    @property
    def more(self) -> Cost:
        """Final cost minus expected cost; negative numbers are refunds. Zero before the end."""
        if self.charged is None or self.charged is self.cost:
            return NOTHING
        return Cost(*(final - expected for final, expected in zip(self.charged, self.cost, strict=True)))

    def begin(self, message: str, *, tokens: int, items: int = 0) -> None:
        """Record a message that is sent to an engine. A message counts once, however often it is sent."""
        if message not in self._messages:
            self._messages.add(message)
            self.begun = Cost(1, self.begun.tokens + tokens, self.begun.items + items)


def used(lease: Lease, status: int, *, overloaded: bool = False) -> Cost:
    """Return the final charge of a request that ended with ``status``.

    ===========================  ==============================================================
    an answer or a stream began  the request; tokens as used, also where the stream broke later
    the client left before that  what had been sent to engines by then
    a refusal                    one request
    an overload, or a fault of   nothing
    the server
    ===========================  ==============================================================

    A request that images were fetched for counts as one request in any case, so a key cannot have images fetched without end; so
    does one that a text worker read and whose client left. ``overloaded``: the status 429 is not that of a limit of the key.
    """
    if status < 400:
        return lease.cost if lease.used_tokens is None else lease.cost._replace(tokens=lease.used_tokens)
    begun, counts = NOTHING, 400 <= status < 500 and not overloaded
    if status == CLIENT_GONE:
        begun, counts = lease.begun, lease.read
    return begun._replace(requests=1) if counts or lease.fetched else begun


class Limiter(Protocol):
    """Keeps the state of all limits. No method raises."""

    async def take(self, lease: Lease) -> Verdict:
        """Take the whole cost of the lease, or nothing."""
        ...

    def end(self, lease: Lease) -> None:
        """Release the lease's concurrency and settle ``lease.more``. Called once for each lease that was granted."""
        ...


def too_much(limits: Limits, cost: Cost) -> str | None:
    """Return the rate whose limit is smaller than ``cost``, so that no wait helps; None if there is none."""
    pairs = zip(RATES, limits.rates, cost, strict=True)
    return next((name for name, limit, amount in pairs if limit is not None and amount > limit), None)


def level(limit: int, ahead: float) -> Level:
    """Return the level of a rate whose allowance is whole in ``ahead`` seconds."""
    ahead = max(0.0, ahead)
    return Level(limit, max(0, math.floor((MINUTE - ahead) * limit / MINUTE + 1e-6)), ahead)
