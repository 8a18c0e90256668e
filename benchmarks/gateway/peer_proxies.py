"""CPU time that a chat costs Yardstick's gateway and other proxies, in one run: ``python -m benchmarks proxies --help``.

All stand before the same process, which answers Yardstick as an engine and the others as an OpenAI server, with the same text.
Yardstick checks a key, fills in the chat template, tokenises the prompt and turns tokens into text.

- LiteLLM's proxy checks a key and leaves the rest to the server behind it. ``--litellm`` names the ``litellm`` command of an
  environment of its own (``pip install 'litellm[proxy]'``). It runs with one worker.
- The router of vLLM's production-stack copies bytes: no keys, no text. ``--vllm-router`` names the Python interpreter of an
  environment that has it. ``vllm-router`` of PyPI is another program; docs/benchmarks/running.md says how to install this one.
  It runs with uvloop and httptools if the environment has them.

A figure is the CPU time of the process and its children: Yardstick's text workers count. No proxy logs requests, except Yardstick,
whose log is read and dropped. Rounds take the proxies in turn, every other round in reverse: the first one after another case
finds colder caches. The last line is JSON. ``--against`` adds the gateway of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from benchmarks.gateway.cpu import drained, serving, tree_seconds
from benchmarks.gateway.floor import read_body
from benchmarks.gateway.tokenise import WORDS
from tests.fakes import FakeEngine, Faults, ids, library
from tests.processes import Program, free_port, wait_until

KEY = "sk-bench"
TEXT = " the quick brown fox jumps over the lazy dog, red running shoes, blue table" * 4
CONNECTIONS = 8
TOKENS = 32
CASES = (("1 token", 1, False), (f"{TOKENS} tokens", TOKENS, False), (f"{TOKENS} tokens, streamed", TOKENS, True))
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
        body = await read_body(receive)
        asked = json.loads(body)
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
def litellm(command: str, url: str, directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the proxy's URL and process."""
    served = {"model_name": "fake", "litellm_params": {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": "none"}}
    config, logs = directory / "litellm.yaml", directory / "logs.json"
    config.write_text(json.dumps({"model_list": [served], "general_settings": {"master_key": KEY}}))
    logs.write_text(json.dumps({"version": 1, "disable_existing_loggers": True, "root": {"level": "ERROR"}}))
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    flags = ["--config", str(config), "--num_workers", "1", "--log_config", str(logs)]
    with _running("LiteLLM", [command, *flags], "/health/liveliness", directory / "litellm.log", environment) as found:
        yield found


@contextmanager
def vllm_router(python: str, url: str, directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the router's URL and process."""
    flags = ["--service-discovery", "static", "--static-backends", url, "--static-models", "fake", "--routing-logic", "roundrobin"]
    command = [python, "-m", "vllm_router.app", *flags, "--log-level", "error"]
    with _running("vLLM's router", command, "/health", directory / "router.log", {}) as found:
        yield found


@contextmanager
def _running(name: str, command: list[str], health: str, log: Path, environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *flags], stdout=file, stderr=file, env=os.environ | environment, cwd=log.parent)  # noqa: S603 - the command that the user names
    try:
        wait_until(lambda: _alive(name, process, f"http://127.0.0.1:{port}{health}", log), START_SECONDS)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def _alive(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"{name} ended: {log.read_text()[-2000:]}")
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _versions(python: str) -> str:
    """Return the versions of what the router is made of."""
    program = """
from importlib.metadata import PackageNotFoundError, version
names = ["vllm-router", "fastapi", "aiohttp", "uvicorn", "uvloop", "httptools"]
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
print(", ".join(f"{name} {found(name)}" for name in names))
"""
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def questions(count: int, seed: int) -> list[str]:
    """Return different texts of some 100 characters: words of English prose, and a number that no other one has."""
    draws = random.Random(seed)
    return [f"{' '.join(draws.choices(WORDS, k=16))} {draws.randrange(10**8)}" for _ in range(count)]


async def _chat(url: str, texts: list[str], tokens: int, *, stream: bool) -> float:
    """Request a chat for each text over a few connections; each must be complete. Returns the number of pieces of one answer."""
    events: list[int] = []
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
                events.append(answer.count('"content":'))

        await asyncio.gather(*[worker() for _ in range(CONNECTIONS)])
    return statistics.mean(events)


def measure(url: str, pid: int, texts: list[str], tokens: int, *, stream: bool) -> tuple[float, float]:
    """CPU milliseconds of the process and its children for a chat of each text, and the pieces of text that an answer comes in."""
    before = tree_seconds(pid)
    pieces = asyncio.run(_chat(url, texts, tokens, stream=stream))
    return (tree_seconds(pid) - before) / len(texts) * 1e3, pieces


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks proxies", description="CPU time a chat beside other proxies.")
    parser.add_argument("--litellm", metavar="PATH", help="the litellm command")
    parser.add_argument("--vllm-router", metavar="PYTHON", help="an interpreter that has the router of vLLM's production-stack")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose gateway is measured as well")
    parser.add_argument("--requests", type=int, default=300, help="chats a figure and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0, help="seconds to wait before measuring, to attach a profiler")
    options = parser.parse_args(arguments)
    versions: dict[str, str] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(serving(Server))
        proxies = {"Yardstick": stack.enter_context(yardstick(url, directory))}
        if options.against:
            proxies["other checkout"] = stack.enter_context(yardstick(url, directory, options.against))
        if options.litellm:
            asked = [options.litellm, "--version"]
            versions["LiteLLM"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
            proxies["LiteLLM"] = stack.enter_context(litellm(options.litellm, url, directory))
        if options.vllm_router:
            versions["vLLM's router"] = _versions(options.vllm_router)
            proxies["vLLM's router"] = stack.enter_context(vllm_router(options.vllm_router, url, directory))
        for round_ in range(options.rounds + 1):
            for number, (case, tokens, stream) in enumerate(CASES):
                texts = questions(options.requests, round_ * len(CASES) + number)
                for name in proxies if round_ % 2 else reversed(proxies):
                    address, pid = proxies[name]
                    taken = measure(address, pid, texts, tokens, stream=stream)
                    if round_:  # the first round warms up
                        found.setdefault(f"{name}, {case}", []).append(taken)
            if not round_ and options.pause:
                print(proxies, file=sys.stderr)
                time.sleep(options.pause)
    print(f"CPU time a chat, {CONNECTIONS} at a time: median (least - most)")
    summary: dict[str, float] = {}
    for name, pairs in found.items():
        cpu, pieces = ([pair[place] for pair in pairs] for place in (0, 1))
        rate = 1000 / statistics.median(cpu)
        summary |= {f"{name}, ms CPU": round(statistics.median(cpu), 3), f"{name}, pieces": round(statistics.median(pieces), 1)}
        print(f"  {name:<35} {statistics.median(cpu):7.3f} ms CPU ({min(cpu):.3f} - {max(cpu):.3f}) = {rate:4.0f} a second a core")
    for name in [name for name in proxies if name != "Yardstick"]:
        for case, _, _ in CASES:
            rounds = zip(found[f"Yardstick, {case}"], found[f"{name}, {case}"], strict=True)
            ratio = statistics.median(our[0] / their[0] for our, their in rounds)
            summary[f"of {name}, {case}"] = round(ratio, 2)
            print(f"  Yardstick / {name}, {case}: {ratio:.2f}")
    print(json.dumps({"versions": versions, "python": sys.version.split()[0], "cores": os.cpu_count(), **summary}))
    return 0
