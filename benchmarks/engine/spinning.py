"""How long idle threads of the engine should spin, and engines without such threads: ``python -m benchmarks spinning``.

Every setting has a gateway and an engine of its own, or several engines, as ``yardstick serve`` starts them. A client reads 32
streams at a time, and sends scores, first on cores that are otherwise idle, then beside a process that computes without end. Each
round measures every setting once, in alternating order; figures are medians of the rounds, ratios are medians of the rounds'
ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from benchmarks.engine import machine
from benchmarks.engine.servers import serving_apart, serving_together
from engine.demo import MODELS
from engine.device import cgroup
from gateway.commands.serve import splitting

OURS = "Yardstick"
"""The setting without a variable: what the engine chooses."""
SETTINGS = (OURS, "spin", "passive")
ENGINES = "engines"
"""The setting with an engine of one thread for each core, as ``yardstick serve --engines`` starts them; behind ``-``, another
``idle_split_tokens`` of the gateway."""
QUIET, SHARED = "quiet", "beside another process"
QUERY, ITEM, ITEMS = 120, 180, 10
BUSY = "while True: pass"

T = TypeVar("T")
Figures = dict[str, dict[str, list[float]]]
"""Workload, setting, and one figure for each round."""


def environment(setting: str) -> dict[str, str]:
    """Variables of a setting's engine: ``passive``, ``spin`` (libgomp's default), or a number of turns."""
    if setting == OURS:
        return {}
    if setting == "passive":
        return {"OMP_WAIT_POLICY": "PASSIVE"}
    return {"GOMP_SPINCOUNT": "300000" if setting == "spin" else str(int(setting))}


@contextmanager
def serving_as(setting: str, model: Path) -> Iterator[str]:
    """Yield the URL of a setting's gateway."""
    several, _, split_tokens = setting.partition("-")
    if several != ENGINES:
        with serving_apart(model, environment=environment(setting)) as (url, _):
            yield url
        return
    engines = math.ceil(min(len(os.sched_getaffinity(0)), cgroup.cores()))
    flags = ["--threads", "1", "--machine-engines", str(engines)]
    gateway = {"YARDSTICK_IDLE_SPLIT_TOKENS": split_tokens} if split_tokens else splitting([None] * engines, {})
    with serving_together(model, engines, flags, settings=gateway) as (url, _):
        yield url


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks spinning", description="Idle threads of the engine: spin or sleep.")
    settings_help = "'spin', 'passive', numbers of turns, 'engines' or 'engines-IDLE_SPLIT_TOKENS' (%(default)s)"
    parser.add_argument("--settings", default=",".join(SETTINGS), help=settings_help)
    parser.add_argument("--model", type=Path, default=MODELS / "base", help="(the demo model)")
    parser.add_argument("--streams", type=int, default=32, help="streams at a time; 0 for none (%(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a stream (%(default)s)")
    parser.add_argument("--scores", type=int, default=10, help="score requests (%(default)s)")
    parser.add_argument("--at-once", default="1", help="score requests at a time; a list measures each number (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the table and the summary")
    options = parser.parse_args(arguments)
    settings = options.settings.split(",")
    figures: Figures = {}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serving_as(name, options.model)) for name in settings}
        measure(urls, options, figures, record=False)
        for place in range(options.rounds):
            measure(dict(in_turn(urls.items(), place)), options, figures)
    figures = {what: {name: by_setting[name] for name in settings} for what, by_setting in figures.items()}
    ratios = {what: ratios_of(by_setting) for what, by_setting in figures.items()}
    lines = list(table(figures, ratios))
    summary = {"bench": "spinning", "machine": machine.describe(), "rounds": options.rounds, "ratios": ratios}
    summary["medians"] = {what: {name: statistics.median(found) for name, found in by.items()} for what, by in figures.items()}
    summary["of quiet"] = of_quiet(figures)
    print("\n".join(lines))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tables.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary), flush=True)
    return 0


def in_turn(settings: Iterable[T], place: int) -> list[T]:
    """The settings in the order of a round: the reverse one in every other round."""
    return list(settings)[:: -1 if place % 2 else 1]


def measure(urls: Mapping[str, str], options: argparse.Namespace, figures: Figures, *, record: bool = True) -> None:
    """One round."""
    for load in (QUIET, SHARED):
        with busy_process(load == SHARED):
            for name, url in urls.items():
                found = {}
                if options.streams:
                    found[f"streamed tokens/s, {load}"] = asyncio.run(stream(url, options.streams, options.tokens))
                for at_once in map(int, options.at_once.split(",")):
                    many = f", {at_once} requests at a time" if at_once > 1 else ""
                    found[f"scored items/s{many}, {load}"] = asyncio.run(score(url, options.scores, at_once))
                for what, figure in found.items() if record else ():
                    figures.setdefault(what, {}).setdefault(name, []).append(figure)


async def stream(url: str, streams: int, tokens: int) -> float:
    """Tokens a second of ``streams`` chats of ``tokens`` tokens at the same time."""
    asked = [{"role": "user", "content": "Describe: red running shoes"}]
    body: dict[str, Any] = {"model": "bench", "messages": asked, "max_tokens": tokens, "stream": True, "ignore_eos": True}

    async def one(session: aiohttp.ClientSession, seed: int) -> None:
        async with session.post(f"{url}/v1/chat/completions", json=body | {"seed": seed}) as answer:
            text = await answer.read()
        if not text.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"{url}: a stream broke off: {text[-500:]!r}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*[one(session, seed) for seed in range(streams)])
        return streams * tokens / (time.perf_counter() - start)


async def score(url: str, requests: int, at_once: int = 1) -> float:
    """Items a second of ``requests`` score requests, ``at_once`` at a time."""
    rng = random.Random()

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(count)]

    def body() -> dict[str, Any]:
        items = [tokens(ITEM) for _ in range(ITEMS)]
        return {"model": "bench", "query": tokens(QUERY), "items": items, "label_token_ids": [5, 6]}

    waiting = iter([body() for _ in range(requests)])

    async def send(session: aiohttp.ClientSession) -> None:
        for each in waiting:
            async with session.post(f"{url}/v1/score", json=each) as answer:
                if answer.status != 200:
                    raise SystemExit(f"{url}: {await answer.text()}")
                await answer.read()

    async with aiohttp.ClientSession() as session:
        start = time.perf_counter()
        await asyncio.gather(*[send(session) for _ in range(at_once)])
        return requests * ITEMS / (time.perf_counter() - start)


@contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """A process that computes without end, if ``wanted``."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY])  # noqa: S603 - our own code
    try:
        yield
    finally:
        process.kill()
        process.wait()


def ratios_of(by_setting: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Figures of the first setting divided by those of each other one, paired by round: medians."""
    first, *others = by_setting
    pairs = {name: zip(by_setting[first], by_setting[name], strict=True) for name in others}
    return {name: statistics.median(ours / other for ours, other in pair) for name, pair in pairs.items()}


def of_quiet(figures: Figures) -> dict[str, dict[str, float]]:
    """Return the throughput beside another process as a fraction of the quiet one, for each setting: medians of the rounds."""
    kept: dict[str, dict[str, float]] = {}
    for what, by_setting in figures.items():
        if what.endswith(SHARED):
            quiet = figures[what.replace(SHARED, QUIET)]
            kept[what] = {
                name: statistics.median(one / other for one, other in zip(found, quiet[name], strict=True))
                for name, found in by_setting.items()
            }
    return kept


def table(figures: Figures, ratios: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The table's lines."""
    kept = of_quiet(figures)
    for what, by_setting in figures.items():
        yield what
        for name, found in by_setting.items():
            line = f"  {name:<12} {statistics.median(found):8.1f} ({min(found):.1f} - {max(found):.1f})"
            if name in ratios[what]:
                line += f"   first / this: {ratios[what][name]:.2f}"
            if what in kept:
                line += f"   of quiet: {kept[what][name]:.2f}"
            yield line
