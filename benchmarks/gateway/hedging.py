"""Hedging of late scores, with and without: ``python -m benchmarks hedging``.

The gateway's choice of replicas, its hedges and its ejections are the real ones; engines and time are simulated. An engine computes
the requests in its queue one after another, in steps, and an aborted request stops after its step. Requests arrive at random (a
Poisson process) with different queries. After a warm-up with equal engines the scenario begins:

==========  ==============================================================================
slow        one engine becomes slower by ``--slowness``
items       the same with ``item_first``: engines keep the items of a catalogue
pauses      each engine sometimes stops for ``--pause-seconds``
mixed       half of the engines become three times slower
even        nothing happens
overload    as even, with requests for 1.1 times what the engines can compute
==========  ==============================================================================

A figure is the median over seeds: latencies, and the tokens computed by all engines beside those without hedges. In the variant
"no ejection", hedges work alone: a replica that loses races is not ejected. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import selectors
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from engine import wire
from gateway.metrics.telemetry import Telemetry
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut
from gateway.pool.health import Health
from gateway.pool.prompts import Prompts
from gateway.pool.replica import Replica, ServedModel
from gateway.tracing import Stage

QUERY, ITEM, ITEMS = 120, 180, 10
"""Tokens of query and item, and items of a request, as in the other benchmarks."""
LIMITS = wire.Limits(max_branches=512, max_slots=1 << 20, max_logprobs=20, max_labels=16, max_sequences=8)
STEP_TOKENS = 512
SHARE = 0.02
NEVER = 1 << 30
VARIANTS = {"without hedges": (0.0, 3), "with hedges": (SHARE, 3), "no ejection": (SHARE, NEVER)}
"""Budget of hedges, and races lost before an ejection."""
SLOWER = {"slow": 1, "items": 1, "mixed": 2}
"""Number of engines that become slower."""


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.SelectSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            events = select(0)
            if not events:
                assert timeout is not None, "all tasks wait, and no timer is set"
                self._now += timeout
            return events

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


@dataclass(eq=False)
class SimulatedEngine:
    """Stands for an engine and for the gateway's client of it."""

    url: str
    options: argparse.Namespace
    random: random.Random
    slowness: float = 1.0
    pause_rate: float = 0.0
    computed: int = 0
    """Tokens computed so far."""
    _kept: set[bytes] = field(default_factory=set)
    _queue: asyncio.Lock = field(default_factory=asyncio.Lock)

    def traced(self, _: Stage | None) -> SimulatedEngine:
        """Return this client; nothing is traced."""
        return self

    async def score(self, request: wire.Score | wire.ScoreItems) -> wire.Scored:
        """Compute a sub-batch after those that came before it."""
        loop = asyncio.get_running_loop()
        received = loop.time()
        async with self._queue:
            waited = loop.time() - received
            if self.random.random() < self.pause_rate:
                await asyncio.sleep(self.options.pause_seconds)
            noise, tokens = self.random.uniform(0.9, 1.1), self._tokens(request)
            for start in range(0, tokens, STEP_TOKENS):
                step = min(STEP_TOKENS, tokens - start)
                self.computed += step
                await asyncio.sleep(step * self.slowness * noise / self.options.tokens_per_second)
        rows = len(request.branches) if isinstance(request, wire.Score) else len(request.lengths) // 4
        return wire.Scored(request.id, [[0.0]] * rows, 0, tokens, waited)

    def _tokens(self, request: wire.Score | wire.ScoreItems) -> int:
        """Return the tokens to compute; items are kept from then on."""
        if isinstance(request, wire.Score):
            return len(request.prefix) + sum(map(len, request.branches))
        ends = list(accumulate(memoryview(request.lengths).cast("I")))
        items = [request.items[4 * start : 4 * end] for start, end in zip([0, *ends], ends, strict=False)]
        new = [item for item in items if item not in self._kept or not request.caller.keep_prefix]
        if request.caller.keep_prefix:
            self._kept.update(new)
        return sum(map(len, new)) // 4 + len(request.query) * len(items)


@dataclass(frozen=True)
class Figures:
    """Result of one run, or their medians."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    load: float
    """Tokens that all engines computed; in the report, beside those without hedges."""


class Simulation:
    """A gateway before simulated engines, in one scenario."""

    def __init__(self, options: argparse.Namespace, scenario: str, seed: int, *, share: float, tolerance: int) -> None:
        self._options, self._scenario = options, scenario
        self._random = random.Random(seed)
        self._catalogue = [[item] * ITEM for item in range(options.catalogue)]
        self.engines = [
            SimulatedEngine(f"http://engine-{number}", options, random.Random(f"{seed} {number}"))
            for number in range(options.engines)
        ]
        replicas = [Replica(cast("Any", engine), health=Health(tolerance), ready=True) for engine in self.engines]
        info = wire.Info("m", "1", 300, 1 << 20, [1], ["score"], LIMITS)
        self._model = ServedModel(info, cast("Any", None), "", replicas)
        telemetry = Telemetry()
        dispatcher = Dispatcher(telemetry, wait_seconds=0, max_waiting=0, hedge_budget=share)
        self._fan_out = FanOut(dispatcher, telemetry, split_tokens=4096)
        self._seconds: list[float] = []

    async def figures(self) -> Figures:
        """Run the scenario after a warm-up."""
        await self._serve(self._options.warm_up)
        for number, engine in enumerate(self.engines):
            engine.computed = 0
            engine.pause_rate = self._options.pause_rate if self._scenario == "pauses" else 0.0
            if number < SLOWER.get(self._scenario, 0):
                engine.slowness = 3.0 if self._scenario == "mixed" else self._options.slowness
        await self._serve(self._options.requests)
        cuts = statistics.quantiles(self._seconds, n=100)
        return Figures(cuts[49] * 1e3, cuts[94] * 1e3, cuts[98] * 1e3, sum(engine.computed for engine in self.engines))

    async def _serve(self, requests: int) -> None:
        options, loop = self._options, asyncio.get_running_loop()
        load = 1.1 if self._scenario == "overload" else options.load
        rate = load * options.engines * options.tokens_per_second / (QUERY + ITEM * ITEMS)
        self._seconds = []
        asked = []
        for _ in range(requests):
            await asyncio.sleep(self._random.expovariate(rate))
            asked.append(loop.create_task(self._request()))
        await asyncio.gather(*asked)

    async def _request(self) -> None:
        loop = asyncio.get_running_loop()
        began, query = loop.time(), [self._random.randrange(300) for _ in range(QUERY)]
        if self._scenario == "items":
            items = self._random.sample(self._catalogue, ITEMS)
            prompts = Prompts((), items, wire.Labels([1]), suffix=query)
        else:
            prompts = Prompts(query, [[1] * ITEM] * ITEMS, wire.Labels([1]))
        await self._fan_out.run(self._model, prompts, prompts.branches, lambda *_: None, None)
        self._seconds.append(loop.time() - began)


def measure(options: argparse.Namespace, scenario: str, variant: str, seed: int) -> Figures:
    """Return the figures of one run."""
    share, tolerance = VARIANTS[variant]
    loop = VirtualTime()
    with (
        asyncio.Runner(loop_factory=lambda: loop) as runner,
        patch("gateway.pool.health.time", SimpleNamespace(monotonic=loop.time)),
    ):
        simulation = Simulation(options, scenario, seed, share=share, tolerance=tolerance)
        return runner.run(simulation.figures())


def rows(options: argparse.Namespace, scenario: str) -> Iterator[tuple[str, Figures]]:
    """Yield the medians of each variant."""
    variants = [variant for variant in VARIANTS if variant != "no ejection" or options.alone]
    runs = {variant: [measure(options, scenario, variant, seed) for seed in range(options.seeds)] for variant in variants}
    least = [run.load for run in runs["without hedges"]]
    for variant, figures in runs.items():
        p50, p95, p99 = [statistics.median(getattr(run, name) for run in figures) for name in ("p50_ms", "p95_ms", "p99_ms")]
        load = statistics.median(run.load / without for run, without in zip(figures, least, strict=True))
        yield variant, Figures(round(p50, 1), round(p95, 1), round(p99, 1), round(load, 4))


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks hedging", description=__doc__.splitlines()[0])
    scenarios = ["slow", "items", "pauses", "mixed", "even", "overload"]
    parser.add_argument("--scenarios", nargs="+", choices=scenarios, default=scenarios, metavar="NAME")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slowness", type=float, default=10.0, help="how many times slower one engine becomes")
    parser.add_argument("--pause-rate", type=float, default=0.005, help="part of the requests in which an engine stops")
    parser.add_argument("--pause-seconds", type=float, default=0.5)
    parser.add_argument("--tokens-per-second", type=float, default=100_000, help="of one engine")
    parser.add_argument("--load", type=float, default=0.5, help="part of what equal engines could compute without caches")
    parser.add_argument("--catalogue", type=int, default=500, help="number of items, in the scenario items")
    parser.add_argument("--warm-up", type=int, default=1000, help="requests before engines become slower")
    parser.add_argument("--requests", type=int, default=4000, help="measured requests")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="also measure hedges without ejections")
    options = parser.parse_args(arguments)
    logging.getLogger("gateway").setLevel(logging.ERROR)
    report: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'':26}{'P50 ms':>9}{'P95 ms':>9}{'P99 ms':>9}{'load':>9}")
    for scenario in options.scenarios:
        for variant, figures in rows(options, scenario):
            report.setdefault(scenario, {})[variant] = asdict(figures)
            print(f"{scenario + ', ' + variant:26}" + "".join(f"{number:>9}" for number in asdict(figures).values()))
    print(json.dumps(vars(options) | report))
    return 0
