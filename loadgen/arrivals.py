"""When requests are due. Every schedule is seconds from the start, ascending, and ends before ``duration_s``.

A run may be shared by several workers. Poisson processes of a part of the rate each add up to one of the whole rate, whatever the
offset between the workers' clocks; constant arrivals interleave; of a trace, each worker takes every so-manieth line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from loadgen.errors import LoadError

Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


class Share(msgspec.Struct, frozen=True):
    """Which worker this is: ``index`` from 0, ``of`` how many."""

    index: int = 0
    of: int = 1

    def seed(self, seed: int, purpose: str) -> Random:
        """Random numbers of this worker's own; the first worker's do not depend on how many there are."""
        return Random(f"{seed} {self.index} {purpose}")


class Poisson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Independent users: gaps are exponential."""

    rate: Rate
    """Requests a second, of all workers together."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:
        """Arrivals without end."""
        return unit_poisson(rng, share.of / self.rate)


class Constant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Equal gaps."""

    rate: Rate
    """Requests a second, of all workers together."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:  # noqa: ARG002 - one signature for all
        """Arrivals without end."""
        return (place / self.rate for place in count(share.index, share.of))


class Ramp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="ramp"):
    """Independent users whose number changes steadily: Poisson, its rate going from ``rate`` to ``to`` over ``over_s``."""

    rate: Rate
    to: Rate
    over_s: Annotated[float, msgspec.Meta(gt=0)]
    """Seconds; afterwards the rate stays at ``to``."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:
        """Arrivals without end: those of a unit Poisson process, through the inverse of the expected number up to a time."""
        return (self._time(expected * share.of) for expected in unit_poisson(rng, 1.0))

    def _time(self, expected: float) -> float:
        """When ``expected`` arrivals are to be expected: the root of ``rate t + (to - rate) t² / (2 over_s)``, then a line."""
        during = (self.rate + self.to) / 2 * self.over_s
        if expected >= during:
            return self.over_s + (expected - during) / self.to
        slope = (self.to - self.rate) / self.over_s
        return 2 * expected / (self.rate + math.sqrt(max(0.0, self.rate**2 + 2 * slope * expected)))


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """The times in a file, seconds, one a line, ascending; ``#`` starts a comment. The first is the start of the run."""

    file: str
    """Beside the scenario, unless absolute."""
    speed: Rate = 1.0
    """2 replays it in half the time."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:  # noqa: ARG002 - one signature for all
        """The file's arrivals. Raises :class:`LoadError`."""
        times = self._read()
        return ((time - times[0]) / self.speed for time in islice(times, share.index, None, share.of))

    def _read(self) -> list[float]:
        try:
            lines = Path(self.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror or "it cannot be read").lower() if isinstance(error, OSError) else "it is not text"
            raise LoadError(f"`arrivals.file`: {self.file}: {reason}; name a file with one time in seconds a line") from None
        times: list[float] = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if text:
                times.append(self._parse(text, number, times[-1] if times else -math.inf))
        if not times:
            raise LoadError(f"`arrivals.file`: {self.file} has no times; write one in seconds on each line")
        return times

    def _parse(self, text: str, number: int, before: float) -> float:
        try:
            time = float(text)
        except ValueError:
            raise LoadError(f"{self.file}, line {number}: {text!r} is not a number of seconds") from None
        if not math.isfinite(time) or time < before:
            raise LoadError(f"{self.file}, line {number}: {text} is not a time after the one before it; sort the file")
        return time


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="closed"):
    """A closed loop: so many clients, each sending its next request when it has its answer. Hides queues; see docs/load.md."""

    clients: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    """Of all workers together."""
    think_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Pause between an answer and the next request."""

    def clients_of(self, share: Share) -> int:
        """This worker's part of them."""
        return len(range(share.index, self.clients, share.of))


Open = Poisson | Constant | Ramp | Trace
Arrivals = Open | Closed


def unit_poisson(rng: Random, mean_gap: float) -> Iterator[float]:
    """Arrivals of a Poisson process, without end."""
    now = 0.0
    while True:
        now += rng.expovariate(1.0) * mean_gap
        yield now


def schedule(arrivals: Open, duration_s: float, seed: int, share: Share) -> Iterator[float]:
    """This worker's arrivals before ``duration_s``. Raises :class:`LoadError` where a trace cannot be read."""
    return takewhile(lambda time: time < duration_s, arrivals.schedule(share.seed(seed, "arrivals"), share))
