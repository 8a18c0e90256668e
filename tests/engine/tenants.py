"""Tenants that use a scheduler, on a clock of the test's own: a step takes a fixed time and more for each token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from yardstick_llm.engine import wire
from yardstick_llm.engine.kvcache.prefix_cache import SlotPool
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import Request, ScoringRequest
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.scheduling.scheduler import Budget, Scheduler

STEP_SECONDS, TOKEN_SECONDS = 0.002, 0.0001
"""About those of a small model on a CPU: 0.2 s for a step of 2,048 tokens."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Maker = Callable[[random.Random, str, wire.Caller, float], Request]


def scores(query: int = 20, items: int = 20, length: int = 30) -> Maker:
    """Score requests with nothing in common."""

    def make(rng: random.Random, name: str, caller: wire.Caller, now: float) -> Request:
        def tokens(count: int) -> list[int]:
            return [rng.randrange(1 << 20)] * count

        branches = [tokens(rng.randint(length // 2, length * 3 // 2)) for _ in range(items)]
        return ScoringRequest.of(wire.Score(name, tokens(query), branches, wire.Labels([1]), caller=caller), now)

    return make


def texts(prompt: int = 200, output: int = 50) -> Maker:
    """Generations with nothing in common."""

    def make(rng: random.Random, name: str, caller: wire.Caller, now: float) -> Request:
        tokens = [rng.randrange(1 << 20)] * rng.randint(prompt // 2, prompt * 3 // 2)
        sampling = wire.Sampling(max_tokens=rng.randint(output // 2, output * 3 // 2))
        return GenerateRequest.of(wire.Generate(name, tokens, sampling, caller=caller), now)

    return make


def mixed(*makers: Maker) -> Maker:
    """Each kind with the same probability."""
    return lambda rng, name, caller, now: rng.choice(makers)(rng, name, caller, now)


@dataclass
class Tenant:
    """A client that keeps ``at_once`` requests open, each followed by the next after up to ``pause`` seconds."""

    name: str
    make: Maker
    at_once: int = 1
    weight: float = 1.0
    pause: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Arrival times of requests to come."""
    latencies: list[float] = field(default_factory=list)
    tokens: int = 0
    """Computed for it."""

    @property
    def caller(self) -> wire.Caller:
        return wire.Caller(tenant=self.name, weight=self.weight)


class Simulation:
    """A scheduler under the load of some tenants."""

    def __init__(self, *tenants: Tenant, slots: int = 1 << 17, tokens: int = 2048, running: int = 256, seed: int = 0) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(SlotPool(slots), Budget(tokens, running), self.clock)
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.rng = random.Random(seed)
        self._names = itertools.count()
        self._open: dict[str, tuple[Tenant, float]] = {}
        """Whose request of an id is, and when it came."""
        self.each_step: Callable[[Batch], None] | None = None
        for tenant in tenants:
            tenant.arrivals = [self.rng.uniform(0, tenant.pause) for _ in range(tenant.at_once)]

    def step(self) -> Batch:
        """Take what has arrived, and compute one step."""
        for tenant in self.tenants.values():
            due = [at for at in tenant.arrivals if at <= self.clock.now]
            tenant.arrivals = [at for at in tenant.arrivals if at > self.clock.now]
            for at in due:
                request = tenant.make(self.rng, f"{tenant.name} {next(self._names)}", tenant.caller, self.clock.now)
                self._open[request.id] = tenant, at
                self.scheduler.add(request)
        batch = self.scheduler.schedule()
        self.clock.now += STEP_SECONDS + TOKEN_SECONDS * batch.load
        for segment in batch.segments:
            self._open[segment.request.id][0].tokens += len(segment.tokens)
        for segment in batch.segments:
            self._settle(segment)
        if batch.empty:
            self.clock.now = max(self.clock.now, min(at for tenant in self.tenants.values() for at in tenant.arrivals))
        if self.each_step is not None:
            self.each_step(batch)
        return batch

    def run(self, name: str, requests: int, most: int = 200_000) -> list[float]:
        """Run until ``count`` requests of a tenant have ended; return the time that each took."""
        for _ in range(most):
            if len(self.tenants[name].latencies) >= requests:
                return self.tenants[name].latencies
            self.step()
        raise AssertionError(f"{len(self.tenants[name].latencies)} requests of {name} ended")

    def _settle(self, segment: ExtendSegment) -> None:
        branch, request = segment.branch, segment.request
        if branch is None or not segment.completes:
            return
        if isinstance(request, GenerateRequest):
            branch.tokens.extend([self.rng.randrange(1 << 20)])
            if len(branch.outputs) < request.message.sampling.max_tokens:
                return
        self.scheduler.finish(branch)
        if not request.branches:
            tenant, at = self._open.pop(request.id)
            tenant.latencies.append(self.clock.now - at)
            tenant.arrivals.append(self.clock.now + self.rng.uniform(0, tenant.pause))
