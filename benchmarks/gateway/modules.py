"""Modules and functions of the gateway that a live request passes: ``python -m benchmarks modules``.

A gateway process runs with a profile function (``sys.setprofile``), and so do the text workers that it forks. A request counts from
its first byte until 20 ms after the end of its answer, with which the work behind an answer ends, on a connection that is open.
Each kind of request is sent several times, with another text each time. Functions count that each of them calls, unless they run as
often without a request. Functions are those under ``gateway/``, without lambdas and comprehensions. A score has the texts of the
standard workload, a query and ten items. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gateway.programs import WORDS, drained, serving
from tests.fakes import FakeEngine
from tests.processes import Program
from yardstick_llm.engine import wire

QUERY, ITEM, ITEMS, CHAT = 120, 180, 10, 16
"""Words of a query and of an item, items, and words of a chat."""
SETTLE_SECONDS = 0.02
NOTHING, NOTHING_SECONDS = "nothing", 0.05
"""No request, for as long as one takes: what half of these times or more call is background work."""
HOOK = """
import mmap, os, sys, threading
_here = os.environ["BENCH_CALLS"]
_flag = mmap.mmap(os.open(f"{_here}/flag", os.O_RDWR), 1)
_calls = os.open(f"{_here}/calls", os.O_WRONLY | os.O_APPEND)
_seen, _root = set(), os.path.join(os.path.realpath(os.getcwd()), "gateway", "")
def _record(frame, event, _):
    number, code = _flag[0], frame.f_code
    if number and event == "call" and (number, id(code)) not in _seen:
        _seen.add((number, id(code)))
        file = os.path.realpath(code.co_filename)
        if file.startswith(_root):
            said = f"{number}\\t{os.getpid()}\\t{file[len(_root):]}\\t{code.co_qualname}\\n"
            os.write(_calls, said.encode())
sys.setprofile(_record)
threading.setprofile(_record)
"""
"""``sitecustomize.py`` of the gateway and of its fork server. The first byte of the flag's file is the number of the request."""


def requests(draws: random.Random) -> dict[str, tuple[str, dict[str, object]]]:
    """Return the path and the body of a request of each kind, with new texts."""

    def text(words: int) -> str:
        return " ".join(draws.choices(WORDS, k=words))

    items, tokens = [text(ITEM) for _ in range(ITEMS)], 8
    chat = {"model": "fake", "messages": [{"role": "user", "content": text(CHAT)}], "max_tokens": tokens}
    return {
        "score": ("/v1/score", {"query": text(QUERY), "items": items, "label_token_ids": [5, 6]}),
        "chat": ("/v1/chat/completions", chat),
        NOTHING: ("", {}),
        "response": ("/v1/responses", {"model": "fake", "input": text(CHAT), "max_output_tokens": tokens}),
    }


def wide_engine() -> FakeEngine:
    """Return a fake engine that takes the requests."""
    limits = wire.Limits(max_branches=64, max_slots=1 << 17, max_logprobs=20, max_labels=16, max_sequences=8)
    return FakeEngine(limits=limits, max_context=1 << 14)


def main(arguments: Sequence[str]) -> int:
    """Count and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks modules", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=30, help="of each kind, at most 60 (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the functions")
    asked, draws = parser.parse_args(arguments), random.Random(0)
    kinds = [kind for _ in range(asked.requests) for kind in requests(draws)]
    with tempfile.TemporaryDirectory() as folder, serving(wide_engine) as engine:
        flag, calls = Path(folder, "flag"), Path(folder, "calls")
        flag.write_bytes(b"\0")
        calls.touch()
        Path(folder, "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        program = Program("gateway", "--engine", engine, PYTHONPATH=path, BENCH_CALLS=folder)
        with flag.open("r+b") as file, mmap.mmap(file.fileno(), 1) as number, drained(program):
            for place in range(-len(set(kinds)), len(kinds)):  # the first of each kind do not count
                where, body = requests(draws)[kinds[place]]
                number[0] = max(0, place + 1)
                if where:
                    answer = program.client.post(where, json=body)
                    assert answer.status_code == 200, answer.text
                time.sleep(SETTLE_SECONDS if where else NOTHING_SECONDS)
                number[0] = 0
        lines = [line.split("\t") for line in calls.read_text().splitlines()]
    called = [set[tuple[str, str, str]]() for _ in kinds]
    for request, pid, module, function in lines:
        if not function.endswith(">"):
            called[int(request) - 1].add(("gateway" if int(pid) == program.process.pid else "worker", module, function))
    idle = Counter(call for calls, kind in zip(called, kinds, strict=True) if kind == NOTHING for call in calls)
    background = {call for call, count in idle.items() if 2 * count >= asked.requests}
    summary: dict[str, dict[str, int]] = {}
    print(f"{'request':<10} {'modules':>8} {'functions':>10}   of these in text workers: modules, functions")
    for kind in dict.fromkeys(kind for kind in kinds if kind != NOTHING):
        of_kind = [some for some, each in zip(called, kinds, strict=True) if each == kind]
        common = set.intersection(*of_kind) - background
        modules, functions = {module for _, module, _ in common}, {call[1:] for call in common}
        theirs = [call for call in common if call[0] == "worker"]
        counts = {"modules": len(modules), "functions": len(functions)}
        counts |= {"worker_modules": len({module for _, module, _ in theirs}), "worker_functions": len(theirs)}
        summary[kind] = counts
        print("{:<10} {:8} {:10} {:12} {:4}".format(kind, *counts.values()))
        for call in sorted(common) if asked.list else ():
            print("  {:<8} {:<40} {}".format(*call))
    print(json.dumps(summary))
    return 0
