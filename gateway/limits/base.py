"""Limits of keys: what they bound, how, and what is answered.

Requests, tokens and items a minute follow the *generic cell rate algorithm* (ITU-T I.371; a leaky bucket kept as one time): a
limit of ``n`` a minute lets ``n`` through at once after a minute of rest and then one more every ``60 / n`` s. All that is kept
of a client is the time at which its allowance will be whole again: a cost moves it ahead, a refund moves it back. It was chosen
over windows because

- one number a limit is little to keep, and to change atomically, in Redis as here;
- what comes back comes back continuously: no crowd at the turn of a minute, and the time to wait is exact;
- what is left and when all will be back, which the headers tell, follow from the same number.

In the worst minute, the one that begins after a rest, twice the limit passes; over any longer time it is the limit.

A request takes its expected cost when it begins and is settled once, when it ends: :func:`used` says what it is charged in the end,
and the difference to the expected cost is given back (or taken, where more was used). Over all time that has passed, what is
charged in the end is at most the limit times the minutes, and one limit more.

Concurrency is a set of leases, one for each request being worked on. They end with the request; those of a gateway that died run
out.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import msgspec

RATES = ("requests", "tokens", "items")
"""In the order in which they stand in every tuple here."""
CONCURRENCY = "concurrency"
MINUTE = 60.0
BUSY_SECONDS = 1.0
"""What is told to wait where all leases are taken: nobody knows when one ends."""


class Limits(NamedTuple):
    """Of one key; None is no limit."""

    rates: tuple[int | None, int | None, int | None] = (None, None, None)
    """A minute, as in :data:`RATES`."""
    concurrency: int | None = None

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return self.concurrency is not None or self.rates != (None, None, None)


class Cost(NamedTuple):
    """Of one request."""

    requests: int
    tokens: int
    items: int


NOTHING = Cost(0, 0, 0)
CLIENT_GONE = 499
"""Status of a request whose client left before an answer began."""


class Level(NamedTuple):
    """How much is left of a rate."""

    limit: int
    """A minute."""
    remaining: int
    reset: float
    """Seconds until all of it will be."""


class Verdict(NamedTuple):
    """The answer to a request for a part of the limits."""

    denied: str | None
    """The limit that stands in the way, one of :data:`RATES` or :data:`CONCURRENCY`; then nothing was taken."""
    wait: float
    """Seconds until it will not; infinite where it always will."""
    levels: tuple[Level | None, Level | None, Level | None]
    """Of each rate, after this request."""


class Lease(msgspec.Struct, eq=False):
    """What a request took, to be settled when it ends."""

    owner: str
    """The key's id."""
    id: str
    limits: Limits
    cost: Cost
    """Expected cost, taken when the request begins."""
    used_tokens: int | None = None
    """Tokens that an answered request used; None: the expected ones."""
    begun: Cost = NOTHING
    """The part of the request that was sent to engines so far."""
    charged: Cost | None = None
    """Final cost; None until the request has ended."""
    shared: bool = False
    """Taken from Redis."""
    _messages: set[str] = msgspec.field(default_factory=set)
    """Ids of the messages that :attr:`begun` counts."""

    @property
    def more(self) -> Cost:
        """Final cost less the expected one: negative where something is given back. Nothing before the end."""
        if self.charged is None or self.charged is self.cost:
            return NOTHING
        return Cost(*(final - expected for final, expected in zip(self.charged, self.cost, strict=True)))

    def begin(self, message: str, *, tokens: int, items: int = 0) -> None:
        """The message with this id is sent to an engine; it counts once, however often it is sent."""
        if message not in self._messages:
            self._messages.add(message)
            self.begun = Cost(1, self.begun.tokens + tokens, self.begun.items + items)


def used(lease: Lease, status: int) -> Cost:
    """What a request is charged that ended with ``status``.

    ===========================  ==============================================================
    an answer or a stream began  the request; tokens as used, also where the stream broke later
    the client left before that  what had been sent to engines by then
    anything else                nothing: a refusal, an overload or a fault of the server
    ===========================  ==============================================================
    """
    if status < 400:
        return lease.cost if lease.used_tokens is None else lease.cost._replace(tokens=lease.used_tokens)
    return lease.begun if status == CLIENT_GONE else NOTHING


class Limiter(Protocol):
    """Keeps what is left. No method raises."""

    async def take(self, lease: Lease) -> Verdict:
        """All of the lease's cost, or nothing."""
        ...

    def end(self, lease: Lease) -> None:
        """The request is over: give its place back, and settle ``lease.more``. Called once for each lease that was taken."""
        ...


def too_much(limits: Limits, cost: Cost) -> str | None:
    """The rate that no wait makes large enough."""
    pairs = zip(RATES, limits.rates, cost, strict=True)
    return next((name for name, limit, amount in pairs if limit is not None and amount > limit), None)


def level(limit: int, ahead: float) -> Level:
    """``ahead``: seconds until the allowance is whole."""
    ahead = max(0.0, ahead)
    return Level(limit, max(0, math.floor((MINUTE - ahead) * limit / MINUTE + 1e-6)), ahead)
