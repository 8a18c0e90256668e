"""Lengths and counts of the requests: a whole number that stands for itself, or one of three distributions."""

from __future__ import annotations

import math
from random import Random
from typing import Annotated

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Uniform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Every whole number from ``min`` to ``max`` is as likely."""

    min: Whole
    max: Whole

    def __post_init__(self) -> None:
        """Raises :class:`ValueError`, which msgspec reports with the key's place."""
        if self.min > self.max:
            raise ValueError("`min` is above `max`; exchange them")

    @property
    def most(self) -> int:
        """The largest value."""
        return self.max

    def draw(self, rng: Random) -> int:
        """One value."""
        return rng.randint(self.min, self.max)


class LogNormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Rounded values whose logarithm is normal: many short ones and a long tail, which ``max`` cuts."""

    median: Positive
    sigma: Positive
    """Standard deviation of the logarithm; 0.5 puts two thirds between 0.6 and 1.65 times the median."""
    max: Whole

    @property
    def most(self) -> int:
        """The largest value."""
        return self.max

    def draw(self, rng: Random) -> int:
        """One value, at least 1; what lies beyond ``max`` becomes ``max``."""
        return min(self.max, max(1, round(math.exp(rng.gauss(math.log(self.median), self.sigma)))))


class Empirical(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """One of ``values``, such as those a production log shows; with ``weights``, as often as they say."""

    values: Annotated[tuple[Whole, ...], msgspec.Meta(min_length=1)]
    weights: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        """Raises :class:`ValueError`, which msgspec reports with the key's place."""
        if self.weights is not None and len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} `weights` for {len(self.values)} `values`; give one for each")

    @property
    def most(self) -> int:
        """The largest value."""
        return max(self.values)

    def draw(self, rng: Random) -> int:
        """One value."""
        return rng.choices(self.values, self.weights)[0]


Distribution = Whole | Uniform | LogNormal | Empirical


def draw(distribution: int | Uniform | LogNormal | Empirical, rng: Random) -> int:
    """One value of ``distribution``."""
    return distribution if isinstance(distribution, int) else distribution.draw(rng)


def most(distribution: int | Uniform | LogNormal | Empirical) -> int:
    """The largest value that ``distribution`` can give."""
    return distribution if isinstance(distribution, int) else distribution.most
