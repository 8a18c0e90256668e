"""CPU time and latency of the gateway for ``/v1/rerank`` with texts: ``python -m benchmarks rerank-cpu``.

A fake engine answers from a process of its own. CPU time is that of the gateway's process and its children, the text workers, with
a few requests at a time; latency is that of requests one after the other. Short documents have 50 to 100 characters, long ones
4,000. All queries are different, so that the cache has no result. ``--against CHECKOUT`` measures the gateway of another checkout
too. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.gateway.programs import OTHER, TEXT, WORDS, drained, in_turn, parser, read_body, report, serving, tree_seconds
from tests.fakes import FakeEngine
from tests.processes import Program
from yardstick_llm.engine import wire
from yardstick_llm.gateway.presets.preset import builtin

CASES = {"1 short": (1, None), "5 short": (5, None), "20 short": (20, None), "20 long": (20, 4000)}
"""Documents of a request, and the characters of each; None: 50 to 100."""
LONG_SHARE = 5
"""Short requests for each long one, which takes several times as long."""
CONNECTIONS = {"CPU": 4, "latency": 1}
"""Requests at a time."""


class Engine:
    """A fake engine that gives all prompts the same scores at no cost. Its preset is that of models without one of their own."""

    def __init__(self) -> None:
        limits = wire.Limits(max_branches=64, max_slots=1 << 17, max_logprobs=20, max_labels=16, max_sequences=8)
        self._fake = FakeEngine(limits=limits, max_context=1 << 14, preset=builtin()["judge"])

    async def __call__(self, scope: Any, receive: Any, send: Callable[[dict[str, Any]], Any]) -> None:
        if scope["type"] != "http" or scope["path"] != "/score":
            await self._fake(scope, receive, send)
            return
        asked = msgspec.msgpack.decode(await read_body(receive), type=wire.Score)
        assert isinstance(asked.readout, wire.Labels)
        scored = wire.Scored(asked.id, [[-1.0] * len(asked.readout.tokens)] * len(asked.branches), 0, 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": wire.encode(scored)})


def requests(case: str, count: int, seed: str) -> list[bytes]:
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
        texts = [text(characters or draws.randint(50, 100)) for _ in range(documents)]
        return json.dumps({"query": query, "documents": texts}).encode()

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


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    options = parser("rerank-cpu", "CPU time and latency of /v1/rerank.", rounds=5, requests=300).parse_args(arguments)
    with ExitStack() as stack:
        url = stack.enter_context(serving(Engine))

        def gateway(checkout: Path | None = None) -> Program:
            program = Program("gateway", "--engine", url, directory=checkout, PYTHONPATH=str(checkout or Path.cwd()))
            return stack.enter_context(drained(program))

        programs = {"gateway": gateway()} | ({OTHER: gateway(options.against)} if options.against else {})

        def measure(case: str, name: str, number: int) -> float:
            documents, _, what = case.rpartition(", ")
            count = max(1, options.requests // (LONG_SHARE if CASES[documents][1] else 1))
            bodies, pid = requests(documents, count, f"{number} {what}"), programs[name].process.pid
            before = tree_seconds(pid)
            taken = asyncio.run(send(programs[name].url, bodies, CONNECTIONS[what]))
            spent = (tree_seconds(pid) - before) / count if what == "CPU" else statistics.median(taken)
            return spent * 1e3

        cases = [f"{documents}, {what}" for documents in CASES for what in CONNECTIONS]
        found = in_turn(options.rounds, cases, [*programs], measure)
    report("/v1/rerank, ms a request", found, [("gateway", OTHER)] if options.against else [])
    return 0
