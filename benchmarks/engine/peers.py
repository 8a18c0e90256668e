"""Scoring on a CPU beside other runtimes: ``python -m benchmarks peers --openvino PYTHON --llamacpp PYTHON``.

Each runtime has an environment of its own, whose Python is named; one that is not named is left out. The engine, transformers and
the runtimes score the same requests of the standard workload with the same weights and threads, one after the other, in float32
and int8, or in the formats that are named: two requests in each turn, of which the second is measured. The others get the full
prompts as one batch. Figures are medians of the rounds; ratios are medians of the rounds' ratios to the engine in float32. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table

from benchmarks.engine.engines import Engine, Scorer, Scores, Transformers
from benchmarks.engine.records import Records, Store, describe
from benchmarks.engine.subject import SHAPES, Workload, subject
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.formats.quantization import format_of
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.kernels.int8 import instructions

PROGRAM = Path(__file__).with_name("peer_process.py")
RUNTIMES = ("openvino", "llamacpp")
NUMBER_FORMATS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", "int8"),
    "bfloat16-int8": ("bfloat16", "int8"),
}
"""Number formats: dtype, and format of the layers' matrix products."""
FORMATS = ("float32", "int8")
"""Formats that are measured unless others are named."""
BFLOAT16_RUNTIMES = ("openvino",)
"""Runtimes that compute in bfloat16 on a CPU."""
BASE = "Yardstick, float32"
SLOTS = 16_384
TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32."""


class Spent(NamedTuple):
    """Time of a request, in seconds."""

    wall: float
    cpu: float


class PeerError(RuntimeError):
    """A runtime cannot be started."""


class Lines:
    """A program that answers each line of JSON with one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own code
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, asked: Any) -> Any:
        """Return the answer. Raises :class:`PeerError`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        """Return the next line that it prints. Raises :class:`PeerError`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            raise PeerError(f"it ended with exit code {code}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()  # closes the pipes


class Peer(Lines):
    """A runtime in a process of its own."""

    def __init__(self, runtime: str, python: Path, checkpoint: Path, form: str) -> None:
        super().__init__([str(python), str(PROGRAM), runtime, str(checkpoint), form, str(torch.get_num_threads())])
        self.spent = Spent(0.0, 0.0)
        """Time of the last request in the runtime's process."""
        self.version: str = self.read()["ready"]

    def score(self, message: wire.Score) -> Scores:
        """Score all prompts of a request as one batch."""
        assert isinstance(message.readout, wire.Labels)
        return self._compute([message.prefix + branch for branch in message.branches], message.readout.tokens)

    def write(self, prompts: list[list[int]], tokens: int) -> Spent:
        """Write as many greedy tokens after each prompt, all at once; only llama.cpp can. Returns the time that it took."""
        self._compute(prompts, [], tokens)
        return self.spent

    def _compute(self, *asked: Any) -> Scores:
        answer = self.ask(asked)
        self.spent = Spent(answer["seconds"], answer["cpu"])
        return answer["rows"]  # type: ignore[no-any-return]


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks peers", description="Scoring on a CPU beside other runtimes.")
    for runtime in RUNTIMES:
        parser.add_argument(f"--{runtime}", type=Path, metavar="PYTHON", help="the Python of its environment (left out)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of random weights (%(default)s)")
    parser.add_argument("--model", help="a model directory, instead of random weights")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(NUMBER_FORMATS)}, float32 first (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the table, the records and the summary")
    options = parser.parse_args(arguments)
    records, workload, rng = Records(Store(options.out)), Workload(), np.random.default_rng(0)
    summary: dict[str, Any] = {"bench": "peers", "machine": describe(), "model": options.model or options.shape, "left_out": {}}
    with subject(options.shape, options.model, "float32") as measured, ExitStack() as stack:
        scorers = start(measured.directory, options, summary["left_out"], stack)
        scorers["transformers, float32"] = Transformers(measured, torch.device("cpu"))
        summary["versions"] = {name: scorer.version for name, scorer in scorers.items() if isinstance(scorer, Peer)}
        message = workload.request("warm", rng, measured.config.vocab_size)
        rows = {name: np.array(scorer.score(message)) for name, scorer in scorers.items()}
        differences = {name: float(np.abs(found - rows[BASE]).max()) for name, found in rows.items()}
        wrong = [name for name, difference in differences.items() if name.endswith("float32") and difference > TOLERANCE]
        assert not wrong, f"these scores differ from the engine's: {wrong}"
        taken: dict[str, list[Spent]] = {name: [] for name in scorers}
        for place in records.progress(range(options.rounds), "rounds"):
            first, message = (workload.request(f"{part}{place}", rng, measured.config.vocab_size) for part in "wr")
            for name, scorer in scorers.items():
                scorer.score(first)  # after the turns of the others, it runs as under load
                taken[name].append(spent(scorer, message))
                records.rows.append({"kind": "peers", "name": name, "seconds": taken[name][-1].wall, "cpu": taken[name][-1].cpu})
    wall, cpu = ({name: [each[clock] for each in times] for name, times in taken.items()} for clock in range(2))
    summary |= {"items_per_s": {name: workload.items / statistics.median(times) for name, times in wall.items()}}
    summary |= {"ratios": {name: ratios(times, wall[BASE]) for name, times in wall.items()}}
    summary |= {"items_per_cpu_s": {name: workload.items / statistics.median(times) for name, times in cpu.items()}}
    summary |= {"cpu_ratios": {name: ratios(times, cpu[BASE]) for name, times in cpu.items()}, "largest_difference": differences}
    show(summary, records)
    records.finish(summary)
    return 0


def start(checkpoint: Path, options: argparse.Namespace, left_out: dict[str, str], stack: ExitStack) -> dict[str, Scorer]:
    """The engine in every format that this machine supports, and the runtimes that are named; why others are left out."""
    scorers: dict[str, Scorer] = {}
    for form in options.formats.split(","):
        dtype_name, quantize = NUMBER_FORMATS[form]
        dtype = getattr(torch, dtype_name)
        if quantize == "int8" and instructions() is None:
            left_out[form] = "the processor has no instructions for it"
            continue
        decoder = load_model(checkpoint, dtype, format_of(quantize, torch.device("cpu"), dtype))
        scorers[f"Yardstick, {form}"] = Engine(decoder, dtype_name, max_total_tokens=SLOTS)
        for runtime in RUNTIMES:
            name, python = f"{runtime}, {form}", getattr(options, runtime)
            try:
                if python is None:
                    raise PeerError(f"--{runtime} names no Python")
                if dtype_name == "bfloat16" and runtime not in BFLOAT16_RUNTIMES:
                    raise PeerError("it has no bfloat16 on a CPU")
                peer = Peer(runtime, python, checkpoint, form)
            except (PeerError, OSError) as error:
                left_out[name] = str(error)
                print(f"left out: {name}: {error}", file=sys.stderr)
                continue
            stack.callback(peer.close)
            scorers[name] = peer
    return scorers


def spent(scorer: Scorer, message: wire.Score) -> Spent:
    """Score a request."""
    wall, cpu = time.perf_counter(), time.process_time()
    scorer.score(message)
    return scorer.spent if isinstance(scorer, Peer) else Spent(time.perf_counter() - wall, time.process_time() - cpu)


def ratios(times: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Throughput relative to the base, paired by round."""
    found = [other / own for own, other in zip(times, base, strict=True)]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def show(summary: Mapping[str, Any], records: Records) -> None:
    """Print the table."""
    columns = "items/s", f"× {BASE}", "items per CPU second", f"× {BASE}", "max Δ"
    table = Table("120/180/10", *columns, title="Scoring on a CPU")
    for name, rate in summary["items_per_s"].items():
        cpu_rate, difference = summary["items_per_cpu_s"][name], summary["largest_difference"][name]
        each = (summary[clock][name] for clock in ("ratios", "cpu_ratios"))
        wall, cpu = (f"{ratio['median']:.2f} ({ratio['least']:.2f}–{ratio['most']:.2f})" for ratio in each)
        table.add_row(name, f"{rate:.1f}", wall, f"{cpu_rate:.1f}", cpu, f"{difference:.1e}")
    records.console.print(table)
    for name, reason in summary["left_out"].items():
        records.console.print(f"left out: {name}: {reason}")
