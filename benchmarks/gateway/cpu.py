"""Measures the CPU time of the gateway's process for a score request: ``python -m benchmarks gateway``.

A fake engine answers from a process of its own, and Redis is one too, so what is measured is the gateway alone: HTTP, JSON, keys,
limits, cache, hop, log. Prompts are token ids, so that nothing is tokenised; what tokenising the same prompts as text costs is a
line of its own. The floor is the same server with one hop to the engine and nothing else (``benchmarks/gateway/floor.py``); figures
divided by it are comparable between machines. ``--against CHECKOUT`` measures the gateway of another checkout too. CPU time is
comparable on a machine that others use as well, up to caches and clock. Each figure is the median of rounds, with all variants of a
round one after the other. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from engine import wire
from gateway.text.prompts import tokenise_pairs
from gateway.text.tokenizer import Tokenizer
from tests.attacks.watch import process_tree
from tests.fakes import TEMPLATE, FakeEngine, Running, library
from tests.processes import Program
from tests.redis import RedisServer

QUERY, ITEM, ITEMS = 120, 180, 10
CONNECTIONS = 8
KEY = "bench"
LIMITS = {"requests_per_minute": 10**7, "tokens_per_minute": 10**10, "items_per_minute": 10**8, "concurrency": 10**4}


@dataclass(frozen=True)
class Variant:
    """Configuration of a gateway."""

    name: str
    redis: bool
    keys: bool


VARIANTS = (
    Variant("memory", redis=False, keys=False),
    Variant("memory, key with limits", redis=False, keys=True),
    Variant("Redis", redis=True, keys=False),
    Variant("Redis, key with limits", redis=True, keys=True),
)
FLOOR = "floor"
AGAINST = ", other checkout"


def _serve(pipe: multiprocessing.connection.Connection, make: Callable[[], Callable[..., Any]]) -> None:
    server = Running(make())
    pipe.send(server.url)
    pipe.recv()


@contextmanager
def serving(make: Callable[[], Callable[..., Any]]) -> Iterator[str]:
    """Yield the URL of the ASGI application that ``make`` returns, in a separate process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=[theirs, make], daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads, in nanoseconds (man 5 proc: schedstat)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def tree_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all processes below it that run."""
    return sum(cpu_seconds(each) for each in process_tree(pid))


@contextmanager
def gateway(engine: str, variant: Variant, redis: RedisServer, keys: Path, checkout: Path | None = None) -> Iterator[Program]:
    """Yield a gateway process with the configuration ``variant``. ``checkout``: where its code is; None for this one."""
    flags = ["--engine", engine]
    flags += ["--api-keys-file", str(keys)] if variant.keys else []
    flags += ["--redis-url", redis.url] if variant.redis else []
    program = Program(
        "gateway", *flags, directory=checkout, YARDSTICK_REDIS_SECONDS="2"
    )  # a busy machine must not turn a hit into a timeout
    with drained(program):
        yield program


@contextmanager
def floor(engine: str) -> Iterator[Program]:
    """Yield the floor as a process."""
    program = Program("benchmarks.gateway.floor", "--engine", engine)
    with drained(program):
        yield program


@contextmanager
def drained(program: Program) -> Iterator[None]:
    """Yield ``program`` when it is ready, and read its stderr: a log without a reader would cost less."""
    stderr = program.process.stderr
    assert stderr is not None
    reader = threading.Thread(target=lambda: deque(stderr, maxlen=0), daemon=True)
    try:
        program.wait_ready()
        reader.start()
        yield
    finally:
        program.process.kill()
        reader.join()
        program.close()


def bodies(count: int, *, fresh: bool) -> Iterator[bytes]:
    """Return requests of the standard workload as token ids: all different, or all the same."""
    ids = range(3, 300)

    def one() -> bytes:
        query, items = random.choices(ids, k=QUERY), [random.choices(ids, k=ITEM) for _ in range(ITEMS)]
        return json.dumps({"query": query, "items": items, "label_token_ids": [5, 6]}).encode()

    same = one()
    return (one() if fresh else same for _ in range(count))


async def send(program: Program, requests: Iterator[bytes], hits: int | None) -> None:
    """Send all requests over a few connections. Fails unless every answer reports ``hits`` cached results; None: not checked."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def worker() -> None:
            for body in requests:
                async with session.post(f"{program.url}/v1/score", data=body) as answer:
                    found = answer.headers.get("x-yardstick-cache")
                    if answer.status != 200 or found != (None if hits is None else f"{hits}/{ITEMS}"):
                        raise SystemExit(f"answer {answer.status}, cache {found}: {(await answer.text())[:300]}")
                    await answer.read()

        await asyncio.gather(*[worker() for _ in range(CONNECTIONS)])


def milliseconds(program: Program, count: int, *, hit: bool) -> float:
    """Return the gateway's CPU milliseconds per request for ``count`` requests."""
    requests = bodies(count + 1, fresh=not hit)
    asyncio.run(send(program, iter([next(requests)]), 0))
    time.sleep(0.2)  # for the write to Redis
    if not hit:
        requests = iter(list(requests))
    before = cpu_seconds(program.process.pid)
    asyncio.run(send(program, requests, ITEMS if hit else 0))
    return (cpu_seconds(program.process.pid) - before) / count * 1e3


def floor_milliseconds(program: Program, count: int) -> float:
    """Return the floor's CPU milliseconds per request for ``count`` requests."""
    requests = iter(list(bodies(count, fresh=True)))
    before = cpu_seconds(program.process.pid)
    asyncio.run(send(program, requests, None))
    return (cpu_seconds(program.process.pid) - before) / count * 1e3


def tokenising_milliseconds(count: int) -> float:
    """Return the CPU milliseconds for tokenising one request's prompts, sent as text."""
    tokenizer = Tokenizer.from_files(wire.TokenizerFiles(library().to_str().encode(), TEMPLATE, {}))
    text: Callable[[int], str] = lambda size: library().decode(random.choices(range(3, 300), k=size))  # noqa: E731
    texts = [(text(QUERY), [text(ITEM) for _ in range(ITEMS)]) for _ in range(count)]
    before = time.process_time()
    for query, items in texts:
        tokenise_pairs(tokenizer, query, items)
    return (time.process_time() - before) / count * 1e3


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gateway", description="CPU time of the gateway for each request.")
    parser.add_argument("--requests", type=int, default=1000, help="requests a figure and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0, help="seconds to wait before measuring, to attach a profiler")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout, whose gateways without Redis are measured"
    )
    options = parser.parse_args(arguments)
    results: dict[str, list[float]] = {}
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start())
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
        keys.write_text(json.dumps({"keys": [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), **LIMITS}]}))
        url = stack.enter_context(serving(FakeEngine))
        programs = {variant.name: stack.enter_context(gateway(url, variant, redis, keys)) for variant in VARIANTS}
        for variant in VARIANTS if options.against else ():
            if not variant.redis:
                other = gateway(url, variant, redis, keys, options.against)
                programs[f"{variant.name}{AGAINST}"] = stack.enter_context(other)
        bare = stack.enter_context(floor(url))
        floor_milliseconds(bare, 200)
        for name, program in programs.items():
            if options.pause:
                print(f"{name}: process {program.process.pid}", file=sys.stderr)
            milliseconds(program, 200, hit=True)
        time.sleep(options.pause)
        for _ in range(options.rounds):
            results.setdefault(FLOOR, []).append(floor_milliseconds(bare, options.requests))
            for hit in (True, False):
                for variant_name, program in programs.items():
                    name = f"{'hit' if hit else 'miss'}, {variant_name}"
                    results.setdefault(name, []).append(milliseconds(program, options.requests, hit=hit))
    results["tokenising, reported apart"] = [tokenising_milliseconds(50) for _ in range(options.rounds)]
    summary = {name: round(statistics.median(values), 4) for name, values in results.items()}
    # per round, because a change of the CPU clock between rounds affects both
    ratios = {
        name: round(statistics.median(value / least for value, least in zip(values, results[FLOOR], strict=True)), 3)
        for name, values in results.items()
        if name != FLOOR
    }
    against = {
        name: round(statistics.median(our / their for our, their in zip(values, results[f"{name}{AGAINST}"], strict=True)), 3)
        for name, values in results.items()
        if f"{name}{AGAINST}" in results
    }
    print(f"CPU milliseconds a request of {ITEMS} items ({QUERY} + {ITEM} tokens): median (least - most), times the floor")
    for name, values in results.items():
        ratio = f"{ratios[name]:.2f}" if name in ratios else ""
        print(f"  {name:<38} {statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})  {ratio}")
    for name, each in against.items():
        print(f"  {name}: {each:.2f} of the other checkout")
    machine = {"unit": "ms CPU a request", "python": sys.version.split()[0], "cores": os.cpu_count()}
    print(json.dumps({**machine, **summary, "ratios": ratios, "against": against}))
    return 0
