"""``python -m benchmarks gpu --run a|b|c``: a run on a GPU machine, in two calls of limited time, which writes one folder.

Run *a* is for an H100 and *b* for an H200; *c* has what they leave out. The parts come in a fixed order. Each is a program with a
time limit that writes what it measures at once; one that fails or runs out of time does not stop the others. A call with
``--continue`` runs what earlier calls left: parts that did not begin and the rest of those that were stopped, then those that
failed. The files are valid at every moment, and so is the archive of them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.accuracy import SMOLLM2
from benchmarks.engine.records import describe, replace
from yardstick_llm.engine.demo import MODELS as DEMO

RUNS = {
    "a": "tests, profile, kernels, rates, guidance and decoding, for an H100",
    "b": "profile, rates, log-probabilities, guidance, catalogues and accuracy, for an H200",
    "c": "what they leave out: other systems, other steps, adapters, experts, drafts, grammars, images, encoders and real weights",
}
LIMIT_SECONDS = 480.0
END_SECONDS = 8.0
"""Time that a part has to write its tables after its own limit, before it is killed."""
WELL = "well"
NO_TIME_LEFT = "no time left"
NEED_A_GPU = "tests", "kernels"
SUMMARY = "summary.json"
MODELS = "models"
"""Folder of random weights, which no archive has."""
ARCHIVE_SECONDS = 15.0
"""Time between two archives: what a call that is killed loses."""


@dataclass(frozen=True)
class Part:
    """One program and its time."""

    name: str
    arguments: Sequence[str]
    seconds: float
    """Most that it may take; less where less is left of the call, and more where no other part is left."""
    resumes: bool = True
    """Whether it understands ``--limit`` and ``--continue``."""


def parts(run: str, out: Path, *, quick: bool = False, model: str = SMOLLM2) -> tuple[Part, ...]:
    """Return the parts of a run in their order; their times fit two calls. ``quick``: on tiny models, which a CPU computes too;
    tests and kernels are left out without a GPU. ``model``: the real model, of which accuracy is measured."""
    models = ["--models", str(out / MODELS)]
    bf16 = ["--dtype", "float32" if quick else "bfloat16"]
    fp8 = [*bf16, "--quantize", "fp8"]
    both = ["--quantize", "none", "fp8"]
    shape = ["--shape", "tiny" if quick else "qwen3-0.6b"]
    rates = ["--quick", "--seconds", "0.5" if quick else "6", "--rates"]

    def part(name: str, seconds: float, *arguments: str) -> Part:
        return Part(name, ["benchmarks", *arguments, "--out", str(out / name.replace(" ", "-"))], seconds)

    def step(name: str, seconds: float, *form: str) -> Part:
        few = ["--max-batched-tokens", "512", "--steps", "2"] if quick else []
        return part(name, seconds, "step", *shape, *form, *few)

    def score(name: str, seconds: float, *options: str) -> Part:
        return part(name, seconds, "score", *shape, *models, *options)

    def online(name: str, seconds: float, values: str, *form: str) -> Part:
        return score(name, seconds, *form, "--online", *rates, "20,40" if quick else values)

    def decode(name: str, seconds: float, *options: str) -> Part:
        few = "--requests 4 --prompt 9 --output 12 --slots 4096 --max-batched-tokens 64" if quick else ""
        return part(name, seconds, "decode", *few.split(), *options)

    def catalogue(name: str, *form: str) -> Part:
        return part(name, 60, "catalogue", *shape, *bf16, *form, *models, *known.split())

    grammars = "" if quick else "--requests 64 --prompt 64 --output 128 --slots 32768"
    images = "tiny --prompt 40" if quick else "tower --requests 64 --prompt 512 --output 16"
    family = ["--family", "modernbert", "--libraries", "sentence-transformers", *(["--quick"] if quick else [])]
    length = ["--shape", "demo" if quick else "7b", "--rows", "1,4" if quick else "1,16,64,100,800", "--repeats", "2"]
    length += ["--output", "6" if quick else "24"]
    known = "--items 12 --item-tokens 30 --per-request 6 --rounds 1 --in-flight 3" if quick else "--rounds 2 --in-flight 400"
    logprobs = ["--shape", "tiny"] if quick else []
    middle = "--requests 256 --prompt 1194 --output 64"
    offline = ["--offline", "--quick"]
    few_drafts = "" if quick else "--shape qwen3-0.6b --requests 8 --prompt 64 --output 96"
    runs = {
        "a": (
            Part("tests", ["tests.shards"], 110, resumes=False),
            step("step", 70, *bf16, *both),
            part("kernels", 70, "kernels"),
            online("online", 80, "2400,2600,2800", *bf16),
            online("online fp8", 80, "3000,3300,3600", *fp8),
            part("length", 120, "length", *length),
            decode("decode", 90, *logprobs, *("" if quick else middle).split()),
        ),
        "b": (
            step("step", 60, *bf16, *both),
            online("online", 80, "2600,2800,3000", *bf16),
            online("online fp8", 80, "3600,4000,4200", *fp8),
            decode("logprobs", 190, *logprobs, *(() if quick else ("--output", "384"))),
            decode("guided", 100, *("--guided demo --samples 2" if quick else "--guided 7b --output 192").split()),
            catalogue("catalogue"),
            part("accuracy", 60, "accuracy", "--quick"),
        ),
        "c": (
            score("offline", 60, *bf16, *offline),
            score("offline fp8", 50, *fp8, *offline),
            step("step 16384", 70, *bf16, *both, *([] if quick else ["--max-batched-tokens", "16384"])),
            online("online 16384", 80, "2400,2600,2800", *bf16, "--max-batched-tokens", "16384"),
            score("rerank shape", 50, *bf16, *offline, "--workload", "3/8/4" if quick else "32/480/20"),
            score("embedding shape", 50, *bf16, *offline, "--workload", "0/8/4" if quick else "0/512/20"),
            decode("experts", 120, *(logprobs or ["--shape", "qwen3-30b-a3b", "--requests", "256", "--output", "64"])),
            step("adapters", 60, *bf16, "--adapters", "2" if quick else "8"),
            step("fused products", 60, *bf16, *both, "--fused"),
            step("decoding steps", 90, *bf16, *both, "--decode", *(["4"] if quick else ["64", "128", "800"])),
            decode("drafts", 60, *logprobs, "--drafts", *few_drafts.split()),
            catalogue("catalogue fp8 kv", "--kv-dtype", "fp8"),
            decode("structured", 40, "--structured", *grammars.split()),
            decode("images", 60, "--images", *images.split()),
            part("encoders", 120, "encoders", *family, "--python", sys.executable, "--formats", *bf16[1:]),
            part("accuracy real", 90, "accuracy", "--quick", "--model", str(DEMO / "base") if quick else model),
            decode("logprobs whole", LIMIT_SECONDS, *logprobs),
        ),
    }  # fmt: skip
    on_gpu = torch.cuda.is_available()
    return tuple(part for part in runs[run] if on_gpu or not quick or part.name not in NEED_A_GPU)


def main(arguments: Sequence[str]) -> int:
    """Run the parts, print a table and one line of JSON. Returns 1 without a GPU unless ``--quick``, or if a part failed or is not
    complete."""
    about = "A run on a GPU machine, in two calls of at most 8 minutes."
    parser = argparse.ArgumentParser("python -m benchmarks gpu", description=about)
    parser.add_argument("--run", choices=RUNS, required=True, help="; ".join(f"{name}: {what}" for name, what in RUNS.items()))
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that comes of it")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of this call (%(default)g)")
    parser.add_argument("--continue", dest="resume", action="store_true", help="run what an earlier call into this folder left")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the folder without models, written all the time")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="these parts, in the order of the run (all)")
    parser.add_argument("--model", default=SMOLLM2, help="a real model for run c, see accuracy --help (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few repeats, to see on any machine that it works")
    asked = parser.parse_args(arguments)
    known = parts(asked.run, asked.out, quick=asked.quick, model=asked.model)
    if unknown := sorted(set(asked.only) - {part.name for part in known}):
        names = ", ".join(part.name for part in known)
        parser.error(f"run {asked.run} has no part {', '.join(unknown)}; it has {names}")
    todo = [part for part in known if not asked.only or part.name in asked.only]
    if not torch.cuda.is_available() and not asked.quick:
        print("bench: torch finds no NVIDIA GPU on this machine; run this command on one that has it.", file=sys.stderr)
        return 1
    out, summary = asked.out, dict[str, Any]()
    earlier = json.loads((out / SUMMARY).read_text(encoding="utf-8")) if asked.resume and (out / SUMMARY).is_file() else {}
    if earlier.get("run", asked.run) != asked.run:
        print(f"bench: {out} has run {earlier['run']}; continue that, or name another folder.", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    summary |= {"bench": "gpu", "run": asked.run, "machine": describe()}
    print(json.dumps(summary), flush=True)
    with archived(out, asked.archive):
        summary["parts"] = run_parts(todo, out, asked.limit, resume=asked.resume, about=summary)
    summary |= {"seconds": time.monotonic() - begun, "not_reached": not_reached(todo, summary["parts"])}
    table = Table("part", "seconds", "ended", "last line")
    for part, result in summary["parts"].items():
        table.add_row(part, f"{result['seconds']:.0f}", result["ended"], result["last_line"][:80])
    console = Console()
    console.print(table)
    console.print(f"{summary['seconds']:.0f} s in this call; not reached: {', '.join(summary['not_reached']) or 'nothing'}")
    print(json.dumps(summary), flush=True)
    return int(any(result["ended"] != WELL for result in summary["parts"].values()))


def run_parts(
    todo: Sequence[Part],
    out: Path,
    limit: float,
    *,
    resume: bool = False,
    clock: Callable[[], float] = time.monotonic,
    start: Callable[[Part, Path, float, bool], str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the parts of ``todo`` that are not complete, one after the other, none beyond ``limit`` seconds from now. Returns the
    state of all, which ``out/summary.json`` has after each part, together with ``about``. What a part says goes to
    ``out/NAME.txt``."""
    start = start or run_part
    end = clock() + limit
    done = _earlier(out / SUMMARY) if resume else {}
    left = [part for part in todo if part.name not in done or not _complete(part, done[part.name])]
    left.sort(key=lambda part: _turn(part, done))
    for part in left:
        begun, again = clock(), part.name in done
        seconds = min(part.seconds if part is not left[-1] else limit, end - begun)
        ended = start(part, out / f"{part.name}.txt", seconds, again) if seconds > END_SECONDS else NO_TIME_LEFT
        if ended == NO_TIME_LEFT and again:
            continue
        took = clock() - begun + (done[part.name]["seconds"] if again else 0)
        done[part.name] = {"ended": ended, "seconds": took, "last_line": _last_line(out / f"{part.name}.txt")}
        content = {**(about or {}), "parts": done, "not_reached": not_reached(todo, done)}
        replace(out / SUMMARY, (json.dumps(content, indent=1) + "\n").encode())
    return done


def not_reached(todo: Sequence[Part], done: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts that did not begin or that lack measurements."""
    return [part.name for part in todo if part.name not in done or not _complete(part, done[part.name])]


def run_part(part: Part, log: Path, seconds: float, again: bool) -> str:
    """Run a part and return its end: ``well``, ``incomplete``, an exit code, or out of time."""
    flags = ["--limit", f"{seconds - END_SECONDS:.0f}", *(["--continue"] if again else [])] if part.resumes else []
    with log.open("ab" if again else "wb") as file:
        # its own session, so that the servers that it starts end with it
        process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-m", *part.arguments, *flags], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return f"out of time after {seconds:.0f} s"
    if code:
        return f"exit code {code}"
    left_out = part.resumes and re.search(r'"(left_out|not_measured)": \["', _last_line(log))
    return "incomplete" if left_out else WELL


@contextmanager
def archived(out: Path, target: Path | None, seconds: float = ARCHIVE_SECONDS) -> Iterator[None]:
    """Write ``target``, if there is one, every ``seconds`` and at the end."""
    if target is None:
        yield
        return
    over = threading.Event()

    def keep_writing() -> None:
        while not over.wait(seconds):
            write_archive(out, target)

    thread = threading.Thread(target=keep_writing, name="archive")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        write_archive(out, target)


def write_archive(out: Path, target: Path) -> None:
    """Pack the files of ``out``, which programs may be writing, without the models."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for path in sorted(out.rglob("*")):
            name = path.relative_to(out)
            try:
                content = b"" if name.parts[0] == MODELS or not path.is_file() else path.read_bytes()
            except FileNotFoundError:  # replaced in the meantime
                continue
            if content:
                entry = tarfile.TarInfo(str(Path(out.name) / name))
                entry.size, entry.mtime = len(content), time.time()
                archive.addfile(entry, io.BytesIO(content))
    replace(target, packed.getvalue())


def _turn(part: Part, done: Mapping[str, Any]) -> int:
    """When a call that continues runs a part: one that failed after the others, because it may fail again, and tests last."""
    if part.name not in done:
        return 0
    return 2 if part.name == "tests" else int(done[part.name]["ended"].startswith("exit code"))


def _complete(part: Part, result: Mapping[str, Any]) -> bool:
    """Whether a part is not run again: it ended well, or its tests failed."""
    return result["ended"] == WELL or (not part.resumes and result["ended"].startswith("exit code"))


def _earlier(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))["parts"]) if path.is_file() else {}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else ""
