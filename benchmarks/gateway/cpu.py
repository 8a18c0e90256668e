"""CPU time of the gateway's process for a score request: ``python -m benchmarks gateway``.

A fake engine answers from a process of its own, and Redis is one too, so what is measured is the gateway alone: HTTP, JSON, keys,
limits, cache, hop, log. Prompts are token ids, so that nothing is tokenised. The floor is the same server with one hop to the
engine and nothing else (``benchmarks/gateway/floor.py``); figures divided by it are comparable between machines. ``--against
CHECKOUT`` measures the gateway of another checkout too. CPU time is comparable on a machine that others use as well, up to caches
and clock. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import aiohttp

from benchmarks.gateway.programs import OTHER, cpu_seconds, drained, in_turn, parser, report, serving
from tests.fakes import FakeEngine
from tests.processes import Program
from tests.redis import RedisServer

QUERY, ITEM, ITEMS = 120, 180, 10
CONNECTIONS = 8
KEY = "bench"
LIMITS = {"requests_per_minute": 10**7, "tokens_per_minute": 10**10, "items_per_minute": 10**8, "concurrency": 10**4}
VARIANTS = {"memory": (), "memory, key with limits": ("keys",), "Redis": ("redis",), "Redis, key with limits": ("keys", "redis")}
"""Parts that the gateway of each variant has. The cache in memory is in all of them."""
FLOOR = "floor"
HIT, MISS = "hit", "miss"


def gateway(
    engine: str, has: Sequence[str], redis: RedisServer, keys: Path, checkout: Path | None = None
) -> AbstractContextManager[Program]:
    """A gateway process. ``checkout``: where its code is; None for this one."""
    flags = ["--engine", engine]
    flags += ["--api-keys-file", str(keys)] if "keys" in has else []
    flags += ["--redis-url", redis.url] if "redis" in has else []
    # A busy machine must not turn a hit into a timeout.
    return drained(Program("gateway", *flags, directory=checkout, YARDSTICK_REDIS_SECONDS="2"))


def bodies(count: int, *, fresh: bool) -> list[bytes]:
    """Return requests of the standard workload as token ids: all different, or all the same."""
    ids = range(3, 300)

    def one() -> bytes:
        query, items = random.choices(ids, k=QUERY), [random.choices(ids, k=ITEM) for _ in range(ITEMS)]
        return json.dumps({"query": query, "items": items, "label_token_ids": [5, 6]}).encode()

    return [one() for _ in range(count)] if fresh else [one()] * count


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


def milliseconds(program: Program, count: int, *, hit: bool, cached: bool) -> float:
    """Return the CPU milliseconds per request for ``count`` requests. ``cached``: whether the program has a cache."""
    first, *requests = bodies(count + 1, fresh=not hit)
    asyncio.run(send(program, iter([first]), 0 if cached else None))
    time.sleep(0.2)  # for the write to Redis
    before = cpu_seconds(program.process.pid)
    asyncio.run(send(program, iter(requests), (ITEMS if hit else 0) if cached else None))
    return (cpu_seconds(program.process.pid) - before) / count * 1e3


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    options = parser("gateway", "CPU time of the gateway for each score request.", rounds=5, requests=1000).parse_args(arguments)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start())
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
        keys.write_text(json.dumps({"keys": [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), **LIMITS}]}))
        url = stack.enter_context(serving(FakeEngine))
        programs = {name: stack.enter_context(gateway(url, has, redis, keys)) for name, has in VARIANTS.items()}
        programs[FLOOR] = stack.enter_context(drained(Program("benchmarks.gateway.floor", "--engine", url)))
        pairs = [(name, FLOOR) for name in VARIANTS]
        if options.against:
            programs[OTHER] = stack.enter_context(gateway(url, VARIANTS["memory"], redis, keys, options.against))
            pairs.append(("memory", OTHER))

        def measure(case: str, name: str, _: int) -> float:
            return milliseconds(programs[name], options.requests, hit=case == HIT, cached=name != FLOOR)

        found = in_turn(options.rounds, (HIT, MISS), [*programs], measure)
    report(f"CPU ms a request of {ITEMS} items ({QUERY} + {ITEM} tokens)", found, pairs)
    return 0
