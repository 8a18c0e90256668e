"""Latency of a gateway that has one core, by its use of the core: ``python -m benchmarks gateway-bend``.

The gateway and its readers share the first core; the load (:mod:`loadgen`) and an engine that answers at once have the others.
Rates are shares of what the core can do, by the CPU time of a request at the rate before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gateway.programs import drained, read_body, serving, tree_seconds
from tests.attacks.watch import process_tree
from tests.fakes import FakeEngine
from tests.processes import Program
from yardstick_llm.engine import wire

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WORKLOADS = {"token ids": "vocab_size = 300", "text": 'input = "text"\nquery_length = 24\nitem_length = 36'}
"""The fake engine's tokeniser makes five tokens of a word."""
SCENARIO = '[target]\ncache = false\n[arrivals]\nkind = "poisson"\nrate = 1\n[[workloads]]\nkind = "score"\n'
FIRST_RATE = 40
_score = msgspec.msgpack.Decoder(wire.Score)


class Constant(FakeEngine):
    """An engine whose scores cost next to nothing."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] != "/score":
            await super().__call__(scope, receive, send)
            return
        asked = _score.decode(await read_body(receive))
        body = wire.encode(wire.Scored(asked.id, [[-0.5, -1.0]] * len(asked.branches), 0, 0, 0.0, 0))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def pin(pids: Iterable[int], core: int) -> None:
    """Keep all threads of processes on one core."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def main(arguments: Sequence[str]) -> int:
    """Measure and print a line for each rate, and one line of JSON; returns the exit code."""
    options = argparse.ArgumentParser("python -m benchmarks gateway-bend", description="Latency of a gateway on one core.")
    options.add_argument("--seconds", type=float, default=15.0, help="of each rate (%(default)s)")
    options.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the core (0.3 to 1)")
    given = options.parse_args(arguments)
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores")
    os.sched_setaffinity(0, cores - {min(cores)})  # inherited by the engine and the load
    try:
        found = {workload: bend(workload, min(cores), given.shares, given.seconds) for workload in WORKLOADS}
    finally:
        os.sched_setaffinity(0, cores)
    print(json.dumps({"bench": "gateway-bend", "cores": os.cpu_count(), "found": found}))
    return 0


def bend(workload: str, core: int, shares: Sequence[float], seconds: float) -> list[dict[str, float]]:
    """Measure a gateway on ``core`` at a low rate, and at each of ``shares``."""
    with serving(Constant) as url, drained(Program("gateway", "--engine", url)) as gateway, tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "scenario.toml"
        scenario.write_text(SCENARIO + WORKLOADS[workload])
        pin(process_tree(gateway.process.pid), core)
        found = [measure(gateway, scenario, FIRST_RATE, seconds)]
        for share in shares:
            found.append(measure(gateway, scenario, share / found[-1]["cpu_s"], seconds))
            print(f"{workload}: " + ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), flush=True)
    return found


def measure(gateway: Program, scenario: Path, rate: float, seconds: float) -> dict[str, float]:
    """Requests a second, cores in use, CPU seconds of a request, milliseconds of latency and of the load's lag, failures."""
    command = [sys.executable, "-m", "yardstick_llm.loadgen", "run", str(scenario), "--url", gateway.url, "--rate", f"{rate:.3f}"]
    before = tree_seconds(gateway.process.pid)
    done = subprocess.run([*command, "--duration", str(seconds)], capture_output=True, text=True, check=False)  # noqa: S603
    summary = json.loads(done.stdout.splitlines()[-1])
    used = tree_seconds(gateway.process.pid) - before
    return {
        "rate": summary["requests"] / seconds,
        "cores": used / seconds,
        "cpu_s": used / summary["requests"],
        "p50_ms": summary["latency_p50_ms"],
        "p99_ms": summary["latency_p99_ms"],
        "lag_p99_ms": summary["lag_p99_ms"],
        "failures": summary["failures"],
    }
