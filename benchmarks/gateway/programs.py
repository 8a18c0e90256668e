"""Code that several benchmarks of the gateway use: starts processes, measures their CPU time in alternating rounds, reports."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tests.attacks.watch import process_tree
from tests.fakes import Running
from tests.processes import Program

OTHER = "other checkout"
WORDS = re.sub(" {2,}", " ", " ".join(topics.values())).split(" ")
"""English prose: the help texts of Python."""

Results = dict[str, dict[str, list[float]]]
"""Case, program, and a value for each round."""


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


@contextmanager
def drained(program: Program) -> Iterator[Program]:
    """Yield ``program`` when it is ready, and read its stderr: a log without a reader would cost less."""
    stderr = program.process.stderr
    assert stderr is not None
    reader = threading.Thread(target=lambda: deque(stderr, maxlen=0), daemon=True)
    try:
        program.wait_ready()
        reader.start()
        yield program
    finally:
        program.process.kill()
        if reader.ident is not None:  # else it was not ready, which the caller learns
            reader.join()
        program.close()


async def read_body(receive: Any) -> bytes:
    """Return the body of a request to an ASGI application."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    return body


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads (man 5 proc: schedstat, in nanoseconds)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def tree_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all processes below it that run."""
    return sum(cpu_seconds(each) for each in process_tree(pid))


def parser(name: str, what: str, rounds: int, requests: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all have."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=what)
    found.add_argument("--requests", type=int, default=requests, help="requests a figure and round (%(default)s)")
    found.add_argument("--rounds", type=int, default=rounds, help="(%(default)s)")
    found.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose gateway is measured as well")
    return found


def in_turn(rounds: int, cases: Sequence[str], programs: Sequence[str], measure: Callable[[str, str, int], float]) -> Results:
    """Measure all programs in every case and round (its number is the third argument), every other round in reverse order. The
    first round warms up."""
    found: Results = {case: {name: [] for name in programs} for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            for name in programs if number % 2 else reversed(programs):
                value = measure(case, name, number)
                if number:
                    found[case][name].append(value)
    return found


def report(unit: str, found: Results, pairs: Sequence[tuple[str, str]], about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Print medians with the least and the most, the ratios of ``pairs`` of programs as medians of the rounds' ratios, and one line
    of JSON, which is returned too."""
    summary: dict[str, Any] = {"unit": unit, "python": sys.version.split()[0], "cores": os.cpu_count(), **(about or {})}
    ratios: dict[str, float] = {}
    print(f"{unit}: median (least - most)")
    for case, programs in found.items():
        for name, values in programs.items():
            summary[f"{name}, {case}"] = middle = round(statistics.median(values), 4)
            print(f"  {f'{name}, {case}':<50} {middle:9.3f} ({min(values):.3f} - {max(values):.3f})")
        for one, other in pairs:
            each = [ours / theirs for ours, theirs in zip(programs[one], programs[other], strict=True)]
            ratios[f"{one} / {other}, {case}"] = round(statistics.median(each), 3)
    for name, ratio in ratios.items():
        print(f"  {name:<60} {ratio:.2f}")
    print(json.dumps(summary | {"ratios": ratios}))
    return summary
