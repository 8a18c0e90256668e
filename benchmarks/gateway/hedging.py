"""Hedging of late scores, with and without: ``python -m benchmarks hedging``.

The gateway's choice of replicas, its hedging and its ejections are the real ones; engines and time are simulated. An engine computes
the requests in its queue one after another, in steps, and an aborted request stops after its step. Requests arrive at random (a
Poisson process), all with different queries. First all engines are equally fast; then, in the scenario ``slow``, one engine becomes
slower, and in the scenario ``pauses`` every engine sometimes stops for a while. The figures are those of the second part: latencies,
and the tokens computed by all engines beside those of the requests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import selectors
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from engine import wire
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut, Prompts
from gateway.pool.health import Health
from gateway.pool.replica import Replica, ServedModel
from gateway.telemetry import Telemetry
from tests.fakes import LIMITS

QUERY, ITEM, ITEMS = 120, 180, 10
TOKENS = QUERY + ITEM * ITEMS
STEP_TOKENS = 512
VARIANTS: dict[str, dict[str, Any]] = {
    "without hedges": {"share": 0.0, "tolerance": 3},
    "with hedges": {"share": 0.02, "tolerance": 3},
    "with hedges, no ejection": {"share": 0.02, "tolerance": 1 << 30},
}


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.SelectSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            events = select(0)
            if not events:
                assert timeout is not None, "every task waits for another one"
                self._now += timeout
            return events

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


@dataclass(eq=False)
class SimulatedEngine:
    """Stands for the client of one engine, and for the engine."""

    url: str
    options: argparse.Namespace
    random: random.Random
    slowness: float = 1.0
    pauses: bool = False
    computed: int = 0
    """Tokens computed so far."""
    _queue: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def score(self, request: wire.Score) -> wire.Scored:
        loop = asyncio.get_running_loop()
        received = loop.time()
        async with self._queue:
            waited = loop.time() - received
            if self.pauses and self.random.random() < self.options.pause_rate:
                await asyncio.sleep(self.options.pause_seconds)
            noise = self.random.uniform(0.9, 1.1)
            for start in range(0, TOKENS, STEP_TOKENS):
                tokens = min(STEP_TOKENS, TOKENS - start)
                self.computed += tokens
                await asyncio.sleep(tokens * self.slowness * noise / self.options.tokens_per_second)
        return wire.Scored(request.id, [[0.0]] * len(request.branches), 0, TOKENS, waited)


class Simulation:
    """A gateway before simulated engines."""

    def __init__(self, options: argparse.Namespace, *, share: float, tolerance: int) -> None:
        self._options = options
        self._random = random.Random(0)
        self._telemetry = Telemetry()
        info = wire.Info("m", "1", 300, 1 << 20, [1], ["score"], LIMITS)
        self.engines = [SimulatedEngine(f"http://engine-{n}", options, random.Random(n)) for n in range(options.engines)]
        replicas = [Replica(cast("Any", engine), health=Health(tolerance), ready=True) for engine in self.engines]
        self._model = ServedModel(info, cast("Any", None), "", replicas)
        dispatcher = Dispatcher(self._telemetry, wait_seconds=0, max_waiting=0, hedge_budget=share)
        self._fan_out = FanOut(dispatcher, self._telemetry, split_tokens=4096)
        self.seconds: list[float] = []

    async def run(self, requests: int) -> None:
        """Serve ``requests`` that arrive at the rate of the options."""
        options, loop = self._options, asyncio.get_running_loop()
        rate = options.load * options.engines * options.tokens_per_second / TOKENS
        self.seconds = []
        open_requests = []
        for _ in range(requests):
            await asyncio.sleep(self._random.expovariate(rate))
            open_requests.append(loop.create_task(self._request()))
        await asyncio.gather(*open_requests)

    async def _request(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        query = [self._random.randrange(300) for _ in range(QUERY)]
        prompts = Prompts(query, [[1] * ITEM] * ITEMS, wire.Labels([1]))
        await self._fan_out.run(self._model, prompts, prompts.branches, lambda places, scored: None, None)
        self.seconds.append(loop.time() - began)

    def hedges(self) -> Mapping[str, float]:
        """Return the counts of hedges by outcome."""
        text = b"".join(self._telemetry.exposition()).decode()
        lines = [line for line in text.splitlines() if line.startswith(("yardstick_hedges", "yardstick_engine_ejections"))]
        return {line.split("{")[-1].split(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def measure(options: argparse.Namespace, scenario: str, share: float, tolerance: int) -> dict[str, float]:
    """Return the figures of one variant."""
    simulation = Simulation(options, share=share, tolerance=tolerance)
    await simulation.run(options.warm_up)
    for engine in simulation.engines[: {"slow": 1, "mixed": 2}.get(scenario, 0)]:
        engine.slowness = options.slowness
    for engine in simulation.engines:
        engine.computed, engine.pauses = 0, scenario == "pauses"
    await simulation.run(options.requests)
    cuts = statistics.quantiles(simulation.seconds, n=100)
    return {
        "p50 ms": round(cuts[49] * 1000, 1),
        "p95 ms": round(cuts[94] * 1000, 1),
        "p99 ms": round(cuts[98] * 1000, 1),
        "load": round(sum(engine.computed for engine in simulation.engines) / (TOKENS * options.requests), 4),
        "h": simulation.hedges(),
        "sl": simulation.engines[0].computed / TOKENS,
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks hedging", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", nargs="*", default=["slow", "pauses"])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slowness", type=float, default=10, help="how many times slower one engine becomes")
    parser.add_argument("--pause-rate", type=float, default=0.01, help="part of the requests in which an engine stops")
    parser.add_argument("--pause-seconds", type=float, default=0.5)
    parser.add_argument("--tokens-per-second", type=float, default=100_000, help="of one engine")
    parser.add_argument("--load", type=float, default=0.4, help="part of what all engines could compute together")
    parser.add_argument("--warm-up", type=int, default=1000, help="requests before engines become slower")
    parser.add_argument("--requests", type=int, default=4000, help="measured requests")
    options = parser.parse_args(arguments)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for scenario in options.scenarios:
        for name, variant in VARIANTS.items():
            with asyncio.Runner(loop_factory=VirtualTime) as runner:
                clock = SimpleNamespace(monotonic=runner.get_loop().time)
                with patch("gateway.pool.health.time", clock):
                    figures = runner.run(measure(options, scenario, **variant))
            report.setdefault(scenario, {})[name] = figures
            print(scenario, name, figures)
    return 0
