"""CPU time that a chat costs Yardstick's gateway and another proxy, in one run: ``python -m benchmarks proxies --help``.

Both stand before the same process, which answers Yardstick as an engine and the other as an OpenAI server, with the same text.
Yardstick checks a key, fills in the chat template, tokenises the prompt and turns tokens into text. The router of vLLM's
production-stack copies bytes: no keys, no text. ``--vllm-router`` names the Python interpreter of an environment that has it.
``vllm-router`` of PyPI is another program; docs/benchmarks/running.md says how to install this one. It runs with uvloop and
httptools if the environment has them.

A figure is the CPU time of the process and its children: Yardstick's text workers count. The router logs no requests; Yardstick's
log is read and dropped. The last line is JSON. ``--against`` adds the gateway of another checkout.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from benchmarks.gateway.programs import OTHER, WORDS, drained, in_turn, parser, read_body, report, serving, tree_seconds
from tests.fakes import FakeEngine, Faults, ids, library
from tests.processes import Program, free_port, wait_until

KEY = "sk-bench"
TEXT = " the quick brown fox jumps over the lazy dog, red running shoes, blue table" * 4
CONNECTIONS = 8
TOKENS = 32
CASES = {"1 token": (1, False), f"{TOKENS} tokens": (TOKENS, False), f"{TOKENS} tokens, streamed": (TOKENS, True)}
"""Tokens, and whether they are streamed."""
LEAST_PIECES = 0.5
"""Pieces of a streamed answer per token, at least, for a figure to count."""
OURS = "Yardstick"
PACE = 0.004
"""Seconds between two tokens, so that each is sent in its own piece."""
START_SECONDS = 120

Send = Callable[[dict[str, Any]], Any]


class Server:
    """Backend of all: an engine for Yardstick, and an OpenAI server with the same answers for the others."""

    def __init__(self) -> None:
        said = ids(TEXT)[:TOKENS]
        self._engine = FakeEngine(says=said, faults=Faults(delay=PACE))
        self._pieces = [library().decode([token]) for token in said]

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["path"] != "/v1/chat/completions":
            await self._engine(scope, receive, send)
            return
        asked = json.loads(await read_body(receive))
        count, stream = asked["max_tokens"], asked.get("stream", False)
        pieces = self._pieces[:count]
        kind = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if stream:
            for place, piece in enumerate(pieces):
                await asyncio.sleep(PACE)
                last = place == count - 1
                event = f"data: {json.dumps(_answer('chat.completion.chunk', 'delta', piece, last))}\n\n"
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        else:
            await asyncio.sleep(count * PACE)
            whole = _answer("chat.completion", "message", "".join(pieces), True)
            whole["usage"] = {"prompt_tokens": 20, "completion_tokens": count, "total_tokens": 20 + count}
            await send({"type": "http.response.body", "body": json.dumps(whole).encode()})


def _answer(kind: str, part: str, text: str, last: bool) -> dict[str, Any]:
    choice = {"index": 0, part: {"role": "assistant", "content": text}, "finish_reason": "stop" if last else None}
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "fake", "choices": [choice]}


@contextmanager
def yardstick(url: str, directory: Path, checkout: Path | None = None) -> Iterator[tuple[str, int]]:
    """Yield the gateway's URL and process. ``checkout``: where its code is; None for this one."""
    keys = directory / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}))
    program = Program("gateway", "--engine", url, "--api-keys-file", str(keys), directory=checkout)
    with drained(program):
        yield program.url, program.process.pid


@contextmanager
def vllm_router(python: str, url: str, directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the router's URL and process."""
    log, port = directory / "router.log", free_port()
    flags = ["--service-discovery", "static", "--static-backends", url, "--static-models", "fake", "--routing-logic", "roundrobin"]
    flags += ["--log-level", "error", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        command = [python, "-m", "vllm_router.app", *flags]
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=directory)  # noqa: S603 - the interpreter that the user names
    try:
        wait_until(lambda: _alive(process, f"http://127.0.0.1:{port}/health", log), START_SECONDS)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def _alive(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"the router ended: {log.read_text()[-2000:]}")
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def _versions(python: str) -> str:
    """Return the versions of what the router is made of."""
    names = ("vllm-router", "fastapi", "aiohttp", "uvicorn", "uvloop", "httptools")
    program = f"from importlib.metadata import distributions as d; print({{x.name: x.version for x in d() if x.name in {names}}})"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def questions(count: int, seed: str) -> list[str]:
    """Return different texts of some 100 characters: words of English prose, and a number that no other one has."""
    draws = random.Random(seed)
    return [f"{' '.join(draws.choices(WORDS, k=16))} {draws.randrange(10**8)}" for _ in range(count)]


async def _chat(url: str, texts: list[str], tokens: int, *, stream: bool) -> None:
    """Request a chat for each text over a few connections; each must be complete."""
    left = iter(texts)
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:

        async def worker() -> None:
            for text in left:
                messages = [{"role": "user", "content": text}]
                body = {"model": "fake", "messages": messages, "max_tokens": tokens, "stream": stream}
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    answer = await response.text()
                if response.status != 200 or not (answer.endswith("data: [DONE]\n\n") if stream else '"content":' in answer):
                    raise SystemExit(f"{url} answered {response.status}: {answer[:500]}")
                pieces = answer.count('"content":')
                if stream and pieces < LEAST_PIECES * tokens:
                    raise SystemExit(f"{url} sent {tokens} tokens in {pieces} pieces; the machine is too busy")

        await asyncio.gather(*[worker() for _ in range(CONNECTIONS)])


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    chosen = parser("proxies", "CPU time a chat beside another proxy.", rounds=5, requests=300)
    chosen.add_argument("--vllm-router", metavar="PYTHON", help="an interpreter that has the router of vLLM's production-stack")
    options = chosen.parse_args(arguments)
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(serving(Server))
        proxies = {OURS: stack.enter_context(yardstick(url, directory))}
        if options.against:
            proxies[OTHER] = stack.enter_context(yardstick(url, directory, options.against))
        if options.vllm_router:
            versions["vLLM's router"] = _versions(options.vllm_router)
            proxies["vLLM's router"] = stack.enter_context(vllm_router(options.vllm_router, url, directory))

        def measure(case: str, name: str, number: int) -> float:
            (address, pid), (tokens, stream) = proxies[name], CASES[case]
            texts = questions(options.requests, f"{number} {case}")
            before = tree_seconds(pid)
            asyncio.run(_chat(address, texts, tokens, stream=stream))
            return 1e3 * (tree_seconds(pid) - before) / len(texts)

        found = in_turn(options.rounds, [*CASES], [*proxies], measure)
    pairs = [(OURS, name) for name in proxies if name != OURS]
    report(f"CPU ms a chat, {CONNECTIONS} at a time", found, pairs, {"versions": versions})
    return 0
