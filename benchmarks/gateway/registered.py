"""Measures the CPU time of the gateway for a request of registered items: ``python -m benchmarks registered``.

A fake engine answers from a process of its own. Each request has a new query, so that no result is in the cache. The cost of a
request for one item is that of HTTP, JSON and the hop; what more items add is the cost of items. The text workers' time is reported
apart: they tokenise the query. With Redis, items come from the gateway's copies. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import aiohttp
import msgspec

from benchmarks.gateway.cpu import cpu_seconds, drained, serving, tree_seconds
from benchmarks.gateway.floor import read_body
from engine import wire
from tests.fakes import FakeEngine
from tests.processes import Program, wait_until
from tests.redis import RedisServer

ITEMS, TOKENS = 1000, 180
SIZES = (1, 100)
CONNECTIONS = 4
LIMITS = wire.Limits(max_branches=2048, max_slots=1 << 20, max_logprobs=20, max_labels=16, max_sequences=8)
_numbers = count()


class _Engine:
    """A fake engine that gives all items the same scores at no cost, so that its work does not empty the processor's caches."""

    def __init__(self) -> None:
        self._fake = FakeEngine(limits=LIMITS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/score":
            await self._fake(scope, receive, send)
            return
        body = await read_body(receive)
        asked = msgspec.msgpack.decode(body, type=wire.ScoreItems)
        scored = wire.Scored(asked.id, [[-1.0, -2.0]] * (len(asked.lengths) // 4), 0, 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": wire.encode(scored)})


def prepare(program: Program) -> None:
    """Register the items."""
    program.client.put("/v1/catalogues/bench", json={"template": ["{item}", "{query}"]}).raise_for_status()
    items = [{"id": f"item-{number}", "token_ids": random.choices(range(3, 300), k=TOKENS)} for number in range(ITEMS)]
    for begin in range(0, ITEMS, 500):
        program.client.put("/v1/catalogues/bench/items", json=items[begin : begin + 500]).raise_for_status()


async def send(program: Program, requests: int, size: int) -> None:
    """Send requests of ``size`` ids, each with another query."""
    async with aiohttp.ClientSession() as session:

        async def worker() -> None:
            for body in bodies:
                async with session.post(f"{program.url}/v1/score", json=body) as answer:
                    if answer.status != 200 or answer.headers["x-yardstick-cache"] != f"0/{size}":
                        raise SystemExit(f"answer {answer.status}: {(await answer.text())[:300]}")
                    await answer.read()

        bodies = _bodies(requests, size)
        await asyncio.gather(*[worker() for _ in range(CONNECTIONS)])


def _bodies(requests: int, size: int) -> Iterator[dict[str, object]]:
    for _ in range(requests):
        ids = [f"item-{number}" for number in random.sample(range(ITEMS), size)]
        yield {"query": f"is it number {next(_numbers)}?", "catalogue": "bench", "ids": ids, "label_token_ids": [5, 6]}


def milliseconds(program: Program, requests: int, size: int) -> tuple[float, float]:
    """Return the CPU milliseconds per request of the gateway's event loop, and those of its text workers."""
    pid = program.process.pid
    before, tree = cpu_seconds(pid), tree_seconds(pid)
    asyncio.run(send(program, requests, size))
    own, all_of_it = cpu_seconds(pid) - before, tree_seconds(pid) - tree
    return own / requests * 1e3, (all_of_it - own) / requests * 1e3


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks registered", description="CPU time of requests for registered items."
    )
    parser.add_argument("--requests", type=int, default=100, help="requests a figure and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    results: dict[str, list[float]] = {}
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start())
        url = stack.enter_context(serving(_Engine))
        programs = {}
        for store, flags in (("memory", []), ("Redis", ["--redis-url", redis.url])):
            programs[store] = Program("gateway", "--engine", url, *flags, YARDSTICK_REDIS_SECONDS="2")
            stack.enter_context(drained(programs[store]))
        wait_until(lambda: "yardstick_redis_available 1" in programs["Redis"].client.get("/metrics").text)
        for program in programs.values():
            prepare(program)
            asyncio.run(send(program, 20, SIZES[-1]))
        for _ in range(options.rounds):
            for store, program in programs.items():
                for size in SIZES:
                    own, workers = milliseconds(program, options.requests, size)
                    results.setdefault(f"{store}, {size} ids", []).append(own)
                    results.setdefault(f"{store}, {size} ids, text workers", []).append(workers)
        for store in programs:
            pairs = zip(results[f"{store}, {SIZES[-1]} ids"], results[f"{store}, 1 ids"], strict=True)
            results[f"{store}, {SIZES[-1]} ids beyond 1"] = [many - one for many, one in pairs]
    print(f"CPU milliseconds a request, items of {TOKENS} tokens: median (least - most)")
    for name, values in results.items():
        print(f"  {name:<38} {statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})")
    summary = {name: round(statistics.median(values), 4) for name, values in results.items()}
    machine = {"unit": "ms CPU a request", "python": sys.version.split()[0], "cores": os.cpu_count()}
    print(json.dumps({**machine, **summary}))
    return 0
