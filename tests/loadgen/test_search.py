"""The search for the highest rate: by a known limit, within bounds, and at a real gateway before an engine of known capacity."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways
from tests.loadgen.test_command import yardstick
from tests.loadgen.test_report import failed, ok, run_of
from yardstick_llm.loadgen.scenario import Scenario, load
from yardstick_llm.loadgen.search import LEAST_RATE, Found, Plan, search
from yardstick_llm.loadgen.statistics import Results, evaluate

OBJECTIVE = 'objectives=["p99 <= 500ms"]'


@dataclass
class Server:
    """Meets the objective up to ``limit`` requests a second. Each run takes ``seconds`` of the clock."""

    limit: float
    seconds: float = 0.0
    now: float = 0.0
    interrupt_at: int = 0

    def measure(self, scenario: Scenario, number: int) -> Results:
        self.now += self.seconds
        rate = scenario.arrivals.rate  # type: ignore[union-attr]
        records = [ok(0, 0.1 if rate <= self.limit else 1.0), *([failed(0)] if rate > 2 * self.limit else [])]
        settings = (OBJECTIVE, f"arrivals.rate={rate}", f"seed={scenario.seed}")
        return evaluate(run_of(records, *settings, interrupted=number == self.interrupt_at))

    def search(self, **changed: Any) -> Found:
        plan = Plan(**({"start": 1.0, "most": 10_000.0, "tolerance": 0.05, "probes": 50, "seconds": 1000.0} | changed))
        return search(load(None, [OBJECTIVE]), plan, "command", self.measure, lambda: self.now)


@pytest.mark.parametrize("limit", [0.3, 1.0, 1.01, 7.7, 47.0, 999.0])
@pytest.mark.parametrize("tolerance", [0.01, 0.3])
def test_a_known_limit_is_found(limit: float, tolerance: float) -> None:
    found = Server(limit).search(tolerance=tolerance)
    assert found.reason == "found"
    assert found.rate is not None
    assert found.missed is not None
    assert found.rate <= limit < found.missed <= found.rate * (1 + tolerance)
    doublings, bisections = abs(math.log2(limit)) + 2, math.log2(math.log(2) / math.log(1 + tolerance)) + 1
    assert len(found.probes) <= doublings + bisections
    seeds = [probe.results.run.scenario["seed"] for probe in found.probes]
    assert len(set(seeds)) == len(seeds), "the result cache knows nothing of a run"


def test_every_bound_ends_the_search() -> None:
    assert (found := Server(1e9).search(most=100)).reason == "most"
    assert (found.rate, found.missed) == (100, None)
    assert [probe.rate for probe in found.probes] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert (found := Server(0).search()).reason == "none"
    assert (found.rate, found.missed) == (None, LEAST_RATE)
    assert (found := Server(30).search(probes=6)).reason == "probes"
    assert (len(found.probes), found.rate, found.missed) == (6, 16, 32)
    server = Server(30, seconds=80)
    assert (found := server.search(seconds=400)).reason == "time"
    assert len(found.probes) == 4, "the fifth would begin at 320 s, and could take 90 s until the last answer"
    assert server.now <= 400
    assert (found := Server(30, interrupt_at=3).search()).reason == "interrupted"
    assert (len(found.probes), found.rate) == (2, 2), "without the run that was interrupted"


PACE, SECONDS, BOUND = 0.02, 2.0, 0.3
"""The engine computes 50 requests a second. Seconds of each run, and the bound on P90."""


@dataclass
class Paced(FakeEngine):
    """Computes one score after another, each in ``PACE`` seconds."""

    free: float = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/score":
            now = time.monotonic()
            self.free = max(now, self.free) + PACE
            await asyncio.sleep(self.free - now)
        await super().__call__(scope, receive, send)


@pytest.mark.slow
@pytest.mark.alone
def test_the_capacity_of_an_engine_is_found(tmp_path: Path) -> None:
    """Above the capacity, requests wait longer and longer, so P90 exceeds its bound at a rate that can be computed."""
    scenario = (
        "arrivals.kind=constant",
        "target.timeout_s=5",
        "target.cache=false",
        "workloads[0].items=1",
        "workloads[0].vocab_size=300",
    )
    settings = [word for setting in scenario for word in ("--set", setting)]
    objectives = ("--objective", f"p90 <= {BOUND}s", "--objective", "failures == 0")
    bounds = ("--duration", str(SECONDS), "--start", "45", "--most", "60", "--tolerance", "0.1", "--limit", "100")
    with gateways() as start:
        url = str(start(Paced()).base_url).rstrip("/")
        done = yardstick("search", "--url", url, *settings, *objectives, *bounds, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["reason"] == "found"
    capacity = 1 / PACE
    highest = capacity * (1 + BOUND / (0.9 * SECONDS))
    assert capacity / 1.1 <= told["rate"] <= highest
    assert capacity <= told["missed"] <= highest * 1.1
    assert json.loads((tmp_path / "search.json").read_text()) == told
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == [f"run-{number:02}" for number in range(1, len(told["probes"]) + 1)]
    assert json.loads((tmp_path / "run-01" / "summary.json").read_text())["requests"] == 45 * SECONDS
