"""The time in which a replica answers, by size of the request: quantiles that follow the last few hundred answers."""

from __future__ import annotations

import math

from engine import wire

QUANTILE = 0.95
LEAST_SECONDS = 0.0005
STEPS = 4
"""Buckets for each doubling of the time, so a quantile is at most 19 % too long."""
BUCKETS = 84
"""Up to :data:`LEAST_SECONDS` · 2^21, 17 minutes."""
WINDOW = 512
"""Number of answers after which all counts are halved."""
MIN_ANSWERS = 20
"""Least number of answers of which a quantile is known."""


class Quantile:
    """Histogram with logarithmic buckets that forgets old observations."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        place = int(STEPS * math.log2(seconds / LEAST_SECONDS)) if seconds > LEAST_SECONDS else 0
        self._counts[min(place, BUCKETS - 1)] += 1
        self._total += 1
        if self._total >= WINDOW:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    @property
    def value(self) -> float | None:
        """The quantile, in seconds; None while there are too few observations."""
        if self._total < MIN_ANSWERS:
            return None
        above = 0.0
        for place in range(BUCKETS - 1, -1, -1):
            above += self._counts[place]
            if above > (1 - QUANTILE) * self._total:
                break
        return LEAST_SECONDS * math.exp2((place + 1) / STEPS)


class Pace:
    """Quantiles of one replica for each size class, and the time that its last request waited in its queue."""

    __slots__ = ("_classes", "queue_seconds")

    def __init__(self) -> None:
        self._classes: dict[int, Quantile] = {}
        self.queue_seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count an answer to a request of the class ``size`` (:func:`size_class`)."""
        quantile = self._classes.get(size)
        if quantile is None:
            quantile = self._classes[size] = Quantile()
        quantile.add(seconds)

    def late_after(self, size: int) -> float | None:
        """Return the time in which the replica answers most requests of the class; None while it is unknown."""
        quantile = self._classes.get(size)
        return None if quantile is None else quantile.value


def size_class(message: wire.Score | wire.ScoreItems, tokens: int) -> int:
    """Return the class of requests whose times are comparable with those of ``message``: one kind, and up to twice the tokens.
    There are less than a hundred classes."""
    kind = 1 if isinstance(message, wire.ScoreItems) else 2 if isinstance(message.readout, wire.LengthValue) else 0
    return kind << 5 | min(tokens.bit_length(), 31)
