"""CPU time and latency of the gateway for ``/v1/rerank`` with texts: ``python -m benchmarks rerank-cpu``.

A fake engine answers from a process of its own. CPU time is that of the gateway's process and its children, the text workers, with
a few requests at a time; latency is that of requests one after the other. Short documents have 50 to 100 characters, long ones
4,000. All queries are different, so that the cache has no result. ``--against CHECKOUT`` measures the gateway of another checkout
too: rounds take both in turn, every other round in reverse. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.gateway.cpu import drained, serving, tree_seconds
from benchmarks.gateway.floor import read_body
from benchmarks.gateway.tokenise import TEXT, WORDS
from engine import wire
from gateway.presets.select import builtin
from tests.fakes import FakeEngine
from tests.processes import Program

CASES = {"1 short": (1, None), "5 short": (5, None), "20 short": (20, None), "20 long": (20, 4000)}
"""Documents of a request, and the characters of each; None: 50 to 100."""
LONG_SHARE = 5
"""Short requests for each long one, which takes several times as long."""
CONNECTIONS = 4
Rank = tuple[float, float]
"""CPU milliseconds of a request, and its median latency in milliseconds."""


class Engine:
    """A fake engine that gives all prompts the same scores at no cost. Its preset is that of models without one of their own."""

    def __init__(self) -> None:
        limits = wire.Limits(max_branches=64, max_slots=1 << 17, max_logprobs=20, max_labels=16, max_sequences=8)
        self._fake = FakeEngine(limits=limits, max_context=1 << 14, preset=builtin()["judge"])

    async def __call__(self, scope: Any, receive: Any, send: Callable[[dict[str, Any]], Any]) -> None:
        if scope["type"] != "http" or scope["path"] != "/score":
            await self._fake(scope, receive, send)
            return
        body = await read_body(receive)
        asked = msgspec.msgpack.decode(body, type=wire.Score)
        assert isinstance(asked.readout, wire.Labels)
        scored = wire.Scored(asked.id, [[-1.0] * len(asked.readout.tokens)] * len(asked.branches), 0, 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": wire.encode(scored)})


@contextmanager
def gateway(engine: str, checkout: Path | None = None) -> Iterator[Program]:
    """Yield a gateway. ``checkout``: where its code is; None for this one."""
    program = Program("gateway", "--engine", engine, directory=checkout, PYTHONPATH=str(checkout or Path.cwd()))
    with drained(program):
        yield program


def requests(case: str, count: int, seed: int) -> list[bytes]:
    """Return different requests of words of English prose."""
    documents, characters = CASES[case]
    draws = random.Random(f"{case} {seed}")

    def text(length: int) -> str:
        if length > 1000:
            begin = draws.randrange(len(TEXT) - length)
            return TEXT[begin : begin + length]
        words = ""
        while len(words) < length:
            words += f" {draws.choice(WORDS)}"
        return words[1 : length + 1]

    def one() -> bytes:
        query = f"{text(40)} {draws.randrange(10**6)}"
        return json.dumps(
            {"query": query, "documents": [text(characters or draws.randint(50, 100)) for _ in range(documents)]}
        ).encode()

    return [one() for _ in range(count)]


async def send(url: str, bodies: list[bytes], connections: int) -> list[float]:
    """Send all requests and return their latencies in seconds."""
    taken: list[float] = []
    left = iter(bodies)
    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:

        async def worker() -> None:
            for body in left:
                began = time.perf_counter()
                async with session.post(f"{url}/v1/rerank", data=body) as answer:
                    content = await answer.read()
                taken.append(time.perf_counter() - began)
                if answer.status != 200:
                    raise SystemExit(f"answer {answer.status}: {content[:300]!r}")

        await asyncio.gather(*[worker() for _ in range(connections)])
    return taken


def measure(program: Program, case: str, count: int, seed: int) -> Rank:
    """Return what a request costs, see :data:`Rank`."""
    count = max(1, count // (LONG_SHARE if CASES[case][1] else 1))
    bodies = requests(case, 2 * count, seed)
    before = tree_seconds(program.process.pid)
    asyncio.run(send(program.url, bodies[:count], CONNECTIONS))
    cpu = (tree_seconds(program.process.pid) - before) / count
    return cpu * 1e3, statistics.median(asyncio.run(send(program.url, bodies[count:], 1))) * 1e3


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rerank-cpu", description="CPU time and latency of /v1/rerank.")
    parser.add_argument("--requests", type=int, default=300, help="requests a figure and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose gateway is measured as well")
    options = parser.parse_args(arguments)
    found: dict[str, list[Rank]] = {}
    with ExitStack() as stack:
        url = stack.enter_context(serving(Engine))
        programs = {"": stack.enter_context(gateway(url))}
        if options.against:
            programs[", other checkout"] = stack.enter_context(gateway(url, options.against))
        for round_ in range(options.rounds + 1):
            for case in CASES:
                for name in programs if round_ % 2 else reversed(programs):
                    taken = measure(programs[name], case, options.requests, round_)
                    if round_:  # the first round warms up
                        found.setdefault(f"{case}{name}", []).append(taken)
    summary: dict[str, float] = {}
    print(f"/v1/rerank: CPU ms a request, {CONNECTIONS} at a time, and latency in ms, one at a time: median (least - most)")
    for name, pairs in found.items():
        for what, place in (("CPU", 0), ("latency", 1)):
            values = [pair[place] for pair in pairs]
            summary[f"{name}, {what}"] = round(statistics.median(values), 3)
            print(f"  {name:<26} {what:<8} {statistics.median(values):8.3f} ({min(values):.3f} - {max(values):.3f})")
    for case in CASES if options.against else ():
        rounds = [*zip(found[case], found[f"{case}, other checkout"], strict=True)]
        for what, place in (("CPU", 0), ("latency", 1)):
            ratios = [our[place] / their[place] for our, their in rounds]
            summary[f"{case}, {what} of the other checkout"] = round(statistics.median(ratios), 2)
            print(f"  {case}: {what} {statistics.median(ratios):.2f} of the other checkout ({min(ratios):.2f} - {max(ratios):.2f})")
    print(json.dumps({"unit": "ms", "python": sys.version.split()[0], "cores": os.cpu_count(), **summary}))
    return 0
