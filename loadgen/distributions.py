"""Distributions of lengths and counts: a constant whole number, or one of three distributions."""

from __future__ import annotations

import math
from random import Random
from typing import Annotated

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Uniform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """All whole numbers from ``min`` to ``max`` with equal probability."""

    min: Whole
    max: Whole

    def __post_init__(self) -> None:
        """Check the bounds. Raises :class:`ValueError`, which msgspec reports with the key's path."""
        if self.min > self.max:
            raise ValueError("`min` is above `max`; exchange them")

    @property
    def most(self) -> int:
        """The largest value."""
        return self.max

    def draw(self, rng: Random) -> int:
        """Draw one value."""
        return rng.randint(self.min, self.max)


class LogNormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Rounded values whose logarithm is normally distributed: many small ones and a long tail, limited by ``max``."""

    median: Positive
    sigma: Positive
    """Standard deviation of the logarithm; 0.5 puts two thirds between 0.6 and 1.65 times the median."""
    max: Whole

    @property
    def most(self) -> int:
        """The largest value."""
        return self.max

    def draw(self, rng: Random) -> int:
        """Draw one value, at least 1; a value beyond ``max`` becomes ``max``."""
        return min(self.max, max(1, round(math.exp(rng.gauss(math.log(self.median), self.sigma)))))


class Empirical(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """One of ``values``, such as those of a production log, with the probabilities given by ``weights``."""

    values: Annotated[tuple[Whole, ...], msgspec.Meta(min_length=1)]
    weights: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises :class:`ValueError`, which msgspec reports with the key's path."""
        if self.weights is not None and len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} `weights` for {len(self.values)} `values`; give one for each")

    @property
    def most(self) -> int:
        """The largest value."""
        return max(self.values)

    def draw(self, rng: Random) -> int:
        """Draw one value."""
        return rng.choices(self.values, self.weights)[0]


Distribution = Whole | Uniform | LogNormal | Empirical


def draw(distribution: int | Uniform | LogNormal | Empirical, rng: Random) -> int:
    """Draw one value of ``distribution``."""
    return distribution if isinstance(distribution, int) else distribution.draw(rng)


def most(distribution: int | Uniform | LogNormal | Empirical) -> int:
    """Return the largest value that ``distribution`` can give."""
    return distribution if isinstance(distribution, int) else distribution.most
