"""CPU time that a streamed token costs the gateway's process: ``python -m benchmarks stream``.

A fake engine in a process of its own sends one delta of every open stream per step, all at the same moment and each as its own HTTP
chunk, as an engine does. Clients read chats over ``--streams`` connections at a time. A figure is the CPU time of the gateway's
process, divided by the number of tokens; it contains the cost of the requests themselves. The floor is the same server with one hop
to the engine and nothing else (``benchmarks/gateway/floor.py``). ``--against CHECKOUT`` measures the gateway of another checkout of
this repository too. Each round measures every variant once, every other round in reverse order; figures are medians of the rounds
and ratios are medians of the rounds' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.gateway.cpu import FLOOR, cpu_seconds, drained, serving
from benchmarks.gateway.floor import read_body
from engine import wire
from tests.fakes import FakeEngine, ids
from tests.processes import Program

TEXT = " the quick brown fox jumps over the lazy dog, red running shoes, blue table"
TOPS = 5
STEP_SECONDS = 0.025
LEAST_EVENTS = 0.5
"""Events per token, at least, for a figure to count. They are fewer than tokens on a machine that is too busy."""
CASES = {"plain": {}, f"{TOPS} log-probabilities": {"logprobs": True, "top_logprobs": TOPS}}


class SteppedEngine:
    """An ASGI application: a :class:`FakeEngine` whose generations advance together, by one token per step."""

    def __init__(self) -> None:
        self._engine = FakeEngine()
        self._said = ids(TEXT)
        self._step: asyncio.Future[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self._engine(scope, receive, send)
            return
        body = await read_body(receive)
        request = msgspec.msgpack.decode(body, type=wire.Generate)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for delta in self._deltas(request):
            await self._next_step()
            await send({"type": "http.response.body", "body": wire.pack_frame(delta), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _deltas(self, request: wire.Generate) -> list[wire.Delta]:
        logprobs = None
        if (tops := request.logprobs) is not None:
            ranked = [-0.1237451 - 0.913247 * rank for rank in range(tops)]
            logprobs = wire.Logprobs([-0.1237451], [self._said[:tops]], [ranked])
        count = request.sampling.max_tokens
        tokens = itertools.islice(itertools.cycle(self._said), count)
        return [
            wire.Delta(request.id, offset, [token], logprobs=logprobs, finish="length" if offset == count - 1 else None)
            for offset, token in enumerate(tokens)
        ]

    async def _next_step(self) -> None:
        if self._step is None:
            loop = asyncio.get_running_loop()
            self._step = loop.create_future()
            loop.call_later(STEP_SECONDS, self._end_step)
        await self._step

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.set_result(None)
            self._step = None


async def chat(url: str, streams: int, tokens: int, fields: dict[str, Any]) -> int:
    """Read ``streams`` chats of ``tokens`` tokens at the same time, and return the number of events. Fails unless each chat arrives
    whole, and nearly every token as its own event: a gateway that cannot keep up gets several deltas at once, which is cheaper."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True, **fields}

    async def one(session: aiohttp.ClientSession) -> bytes:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            return await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(*[one(session) for _ in range(streams)])
    counts = [answer.count(b"data: {") for answer in answers]
    broken = next((answer for answer in answers if not answer.endswith(b"data: [DONE]\n\n")), None)
    if broken is not None or sum(counts) < LEAST_EVENTS * streams * tokens:
        raise SystemExit(f"{url}: {sum(counts)} events for {streams * tokens} tokens; {(broken or b'')[-500:]!r}")
    return sum(counts)


def microseconds(program: Program, streams: int, tokens: int, fields: dict[str, Any]) -> float:
    """CPU microseconds of ``program`` for each event."""
    before = cpu_seconds(program.process.pid)
    events = asyncio.run(chat(program.url, streams, tokens, fields))
    return (cpu_seconds(program.process.pid) - before) / events * 1e6


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stream", description="CPU time of the gateway for each token.")
    parser.add_argument("--streams", type=int, default=32, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose gateway is measured too")
    parser.add_argument("--pause", type=float, default=0, help="seconds to wait before measuring, to attach a profiler")
    options = parser.parse_args(arguments)
    results: dict[str, list[float]] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(serving(SteppedEngine))
        programs = {
            FLOOR: Program("benchmarks.gateway.floor", "--engine", engine),
            "gateway": Program("gateway", "--engine", engine),
        }
        if options.against:
            programs["against"] = Program("gateway", "--engine", engine, directory=options.against)
        for name, program in programs.items():
            stack.enter_context(drained(program))
            microseconds(program, options.streams, 20, {})
            if options.pause:
                print(f"{name}: process {program.process.pid}", file=sys.stderr)
        time.sleep(options.pause)
        for round_ in range(options.rounds):
            order = [*programs] if round_ % 2 == 0 else [*reversed(programs)]
            for (case, fields), name in itertools.product(CASES.items(), order):
                program = programs[name]
                found = microseconds(program, options.streams, options.tokens, fields)
                results.setdefault(f"{name}, {case}", []).append(found)
    ratios = {}
    for case in CASES:
        ours = results[f"gateway, {case}"]
        for name in programs.keys() - {"gateway"}:
            pairs = zip(ours, results[f"{name}, {case}"], strict=True)
            ratios[f"{case}, of {name}"] = round(statistics.median(mine / other for mine, other in pairs), 3)
    print(f"CPU microseconds a streamed token, {options.streams} streams at a time: median (least - most)")
    for name, values in results.items():
        print(f"  {name:<32} {statistics.median(values):6.1f} ({min(values):.1f} - {max(values):.1f})")
    for name, ratio in sorted(ratios.items()):
        print(f"  gateway / {name:<30} {ratio:.2f}")
    machine = {"unit": "us CPU a token", "python": sys.version.split()[0], "cores": os.cpu_count()}
    summary = {name: round(statistics.median(values), 1) for name, values in results.items()}
    print(json.dumps({**machine, **summary, "ratios": ratios}))
    return 0
