"""Arrival schedules. ``schedule`` of a kind yields ascending times in seconds from the start; only stages and traces end.

Several workers may share a run. Independent Poisson processes with parts of the rate add up to one with the whole rate, whatever
the offset between the workers' clocks; constant arrivals interleave; each of N workers takes every N-th line of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from yardstick_llm.loadgen.errors import LoadError, reason_of

Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


class Share(msgspec.Struct, frozen=True):
    """The share of one worker: its ``index`` from 0, and the number ``of`` workers."""

    index: int = 0
    of: int = 1

    def seed(self, seed: int, purpose: str) -> Random:
        """Return a random generator for this worker; that of the first worker does not depend on the number of workers."""
        return Random(f"{seed} {self.index} {purpose}")


class Poisson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Independent users: exponentially distributed gaps."""

    rate: Rate
    """Requests per second of all workers together."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:
        return unit_poisson(rng, share.of / self.rate)


class Constant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Equal gaps."""

    rate: Rate
    """Requests per second of all workers together."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:  # noqa: ARG002 - one signature for all
        return (place / self.rate for place in count(share.index, share.of))


class Ramp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="ramp"):
    """Independent users whose number changes linearly: Poisson, with a rate from ``rate`` to ``to`` over ``over_s``."""

    rate: Rate
    to: Rate
    over_s: Annotated[float, msgspec.Meta(gt=0)]
    """Length of the ramp in seconds; after it the rate stays at ``to``."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:
        """Yield arrivals without end: those of a unit Poisson process, mapped by the inverse of the expected number over time."""
        return (self._time(expected * share.of) for expected in unit_poisson(rng, 1.0))

    def _time(self, expected: float) -> float:
        """Return the time of ``expected`` arrivals: the root of ``rate t + (to - rate) t² / (2 over_s)``, then linear."""
        during = (self.rate + self.to) / 2 * self.over_s
        if expected >= during:
            return self.over_s + (expected - during) / self.to
        slope = (self.to - self.rate) / self.over_s
        return 2 * expected / (self.rate + math.sqrt(max(0.0, self.rate**2 + 2 * slope * expected)))


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a run with one rate."""

    rate: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
    """Requests per second of all workers together; 0 is a pause."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=10_000_000)]


class Stages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="stages"):
    """Independent users whose number changes in steps: Poisson, with the rate of each stage in turn."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=100)]

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:
        """Yield the arrivals of all stages: those of a unit Poisson process, mapped by the inverse of the expected number."""
        arrivals = unit_poisson(rng, share.of)
        expected, begin, before = next(arrivals), 0.0, 0.0
        for stage in self.stages:
            until = before + stage.rate * stage.seconds
            while expected < until:
                yield begin + (expected - before) / stage.rate
                expected = next(arrivals)
            begin, before = begin + stage.seconds, until


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Times from a file: ascending seconds, one per line; ``#`` starts a comment. The first is the start of the run."""

    file: str
    """Path of the file, relative to the scenario's folder."""
    speed: Rate = 1.0
    """Replay speed; 2 takes half the time."""

    def schedule(self, rng: Random, share: Share) -> Iterator[float]:  # noqa: ARG002 - one signature for all
        """Yield the file's arrivals. Raises :class:`LoadError`."""
        try:
            lines = Path(self.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "it is not text"
            raise LoadError(f"`arrivals.file`: {self.file}: {reason}; name a file with one time in seconds a line") from None
        times: list[float] = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            try:
                time = float(text)
            except ValueError:
                raise LoadError(f"{self.file}, line {number}: {text!r} is not a number of seconds") from None
            if not math.isfinite(time) or (times and time < times[-1]):
                raise LoadError(f"{self.file}, line {number}: {text} is not a time after the one before it; sort the file")
            times.append(time)
        if not times:
            raise LoadError(f"`arrivals.file`: {self.file} has no times; write one in seconds on each line")
        return ((time - times[0]) / self.speed for time in islice(times, share.index, None, share.of))


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="closed"):
    """A closed loop: each client sends its next request after its last answer. It hides queueing; see docs/load.md."""

    clients: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    """Number of clients of all workers together."""
    think_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Pause between an answer and the next request, in seconds."""

    def clients_of(self, share: Share) -> int:
        """Return this worker's number of clients."""
        return len(range(share.index, self.clients, share.of))


Open = Poisson | Constant | Ramp | Stages | Trace
Arrivals = Open | Closed


def unit_poisson(rng: Random, mean_gap: float) -> Iterator[float]:
    """Yield arrivals of a Poisson process, without end."""
    now = 0.0
    while True:
        now += rng.expovariate(1.0) * mean_gap
        yield now


def schedule(arrivals: Open, duration_s: float, seed: int, share: Share) -> Iterator[float]:
    """Yield this worker's arrivals before ``duration_s``. Raises :class:`LoadError` if a trace cannot be read."""
    return takewhile(lambda time: time < duration_s, arrivals.schedule(share.seed(seed, "arrivals"), share))
