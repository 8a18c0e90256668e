"""CPU time that a streamed token costs the gateway's process: ``python -m benchmarks stream``.

A fake engine in a process of its own sends one delta of every open stream per step, all at the same moment and each as its own HTTP
chunk, as an engine does. A figure is the CPU time of the gateway's process, divided by the number of tokens; it contains the cost
of the requests themselves. The floor is the same server with one hop to the engine and nothing else
(``benchmarks/gateway/floor.py``). ``--against CHECKOUT`` measures the gateway of another checkout of this repository too. The last
line is JSON.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp
import msgspec

from benchmarks.gateway.cpu import FLOOR
from benchmarks.gateway.programs import OTHER, cpu_seconds, drained, in_turn, parser, read_body, report, serving
from tests.fakes import FakeEngine, ids
from tests.processes import Program
from yardstick_llm.engine import wire

TEXT = " the quick brown fox jumps over the lazy dog, red running shoes, blue table"
TOPS = 5
STEP_SECONDS = 0.025
LEAST_EVENTS = 0.5
"""Events per token, at least, for a figure to count. They are fewer than tokens on a machine that is too busy."""
CASES: dict[str, dict[str, Any]] = {"plain": {}, f"{TOPS} log-probabilities": {"logprobs": True, "top_logprobs": TOPS}}


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
        request = msgspec.msgpack.decode(await read_body(receive), type=wire.Generate)
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
    events = sum(answer.count(b"data: {") for answer in answers)
    broken = next((answer for answer in answers if not answer.endswith(b"data: [DONE]\n\n")), None)
    if broken is not None or events < LEAST_EVENTS * streams * tokens:
        raise SystemExit(f"{url}: {events} events for {streams * tokens} tokens; {(broken or b'')[-500:]!r}")
    return events


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    chosen = parser("stream", "CPU time of the gateway for each token.", rounds=7, requests=32)
    chosen.add_argument("--tokens", type=int, default=200, help="tokens of each stream; --requests are streams at a time")
    options = chosen.parse_args(arguments)
    with ExitStack() as stack:
        engine = stack.enter_context(serving(SteppedEngine))
        flags = "--engine", engine
        programs = {FLOOR: stack.enter_context(drained(Program("benchmarks.gateway.floor", *flags)))}
        programs["gateway"] = stack.enter_context(drained(Program("gateway", *flags)))
        if options.against:
            programs[OTHER] = stack.enter_context(drained(Program("gateway", *flags, directory=options.against)))

        def measure(case: str, name: str, _: int) -> float:
            pid = programs[name].process.pid
            before = cpu_seconds(pid)
            events = asyncio.run(chat(programs[name].url, options.requests, options.tokens, CASES[case]))
            return (cpu_seconds(pid) - before) / events * 1e6

        found = in_turn(options.rounds, [*CASES], [*programs], measure)
    pairs = [("gateway", name) for name in programs if name != "gateway"]
    report(f"CPU µs a streamed token, {options.requests} streams at a time", found, pairs)
    return 0
