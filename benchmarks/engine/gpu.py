"""``python -m benchmarks gpu``: runs everything that needs a GPU machine, in two calls of limited time, and writes one folder.

The most valuable parts come first. Each is a program with a time limit that writes what it measures at once; one that fails or
runs out of time does not stop the others. A call with ``--continue`` runs what earlier calls left: parts that did not begin and
the rest of those that were stopped, then those that failed. The files are valid at every moment, and so is the archive of them.
"""

from __future__ import annotations

import io
import json
import os
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

from benchmarks.engine import machine
from benchmarks.engine.store import replace

LIMIT_SECONDS = 480.0
RATES = "2500,1200,2000,3000,1600,1000,800,600"
"""Items a second: the target first, then those of the published tables and higher ones."""
FP8_RATES = "3500,2500,3000,4000,2000,1200"
END_SECONDS = 8.0
"""Time that a part has to write its tables after its own limit, before it is killed."""
WELL = "well"
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
    """Most that it may take; less where less is left of the call."""
    resumes: bool = True
    """Whether it understands ``--limit`` and ``--continue``."""


def parts(out: Path) -> tuple[Part, ...]:
    """Return the parts, the most valuable first. Their times fit two calls, and those of the first four fit the first call."""
    score = ["benchmarks", "score", "--shape", "qwen3-0.6b", "--dtype", "bfloat16", "--models", str(out / MODELS)]
    fp8 = [*score, "--quantize", "fp8"]
    length = [
        "benchmarks",
        "length",
        "--shape",
        "7b",
        "--rows",
        "100,16,1,800",
        "--repeats",
        "2",
        "--output",
        "24",
        "--no-ablations",
    ]
    online = ["--online", "--quick", "--seconds", "3", "--rates"]
    offline = ["--offline", "--no-sweeps", "--quick", "--out"]
    return (
        Part("tests", ["tests.shards"], 160, resumes=False),
        Part("offline", [*score, *offline, str(out / "offline")], 80),
        Part("online", [*score, *online, RATES, "--out", str(out / "online")], 130),
        Part("kernels", ["benchmarks", "kernels", "--out", str(out / "kernels")], 80),
        Part("fp8 online", [*fp8, *online, FP8_RATES, "--out", str(out / "fp8-online")], 110),
        Part("length", [*length, "--out", str(out / "lenvm")], 150),
        Part("fp8 offline", [*fp8, *offline, str(out / "fp8-offline")], 70),
        Part("accuracy", ["benchmarks", "accuracy", "--quick", "--out", str(out / "accuracy")], 80),
        Part("sweeps", [*score, "--offline", "--ablations", "--quick", "--out", str(out / "sweeps")], 90),
    )


def run(out: Path, *, limit: float = LIMIT_SECONDS, resume: bool = False, archive: Path | None = None) -> int:
    """Run the parts, print a table and one line of JSON. Returns 1 without a GPU, or if a part failed or is not complete.

    ``archive``: a .tar.gz for all files but the models.
    """
    if not torch.cuda.is_available():
        print("bench: torch finds no NVIDIA GPU on this machine; run this command on one that has it.", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"bench": "gpu", "machine": machine.describe()}
    print(json.dumps(summary), flush=True)
    with archived(out, archive):
        summary["parts"] = run_parts(parts(out), out, limit, resume=resume)
    table = Table("part", "seconds", "ended", "last line")
    for name, result in summary["parts"].items():
        table.add_row(name, f"{result['seconds']:.0f}", result["ended"], result["last_line"][:80])
    Console().print(table)
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
) -> dict[str, Any]:
    """Run the parts of ``todo`` that are not complete, one after the other, none beyond ``limit`` seconds from now. Returns the
    state of all, which ``out/summary.json`` has after each part. What a part says goes to ``out/NAME.txt``."""
    start = start or run_part
    end = clock() + limit
    done = _earlier(out / SUMMARY) if resume else {}
    for part in sorted(todo, key=lambda part: _turn(part, done)):
        if part.name in done and _complete(part, done[part.name]):
            continue
        begun, again = clock(), part.name in done
        seconds = min(part.seconds, end - begun)
        ended = start(part, out / f"{part.name}.txt", seconds, again) if seconds > END_SECONDS else "no time left"
        if ended == "no time left" and again:
            continue
        took = clock() - begun + (done[part.name]["seconds"] if again else 0)
        done[part.name] = {"ended": ended, "seconds": took, "last_line": _last_line(out / f"{part.name}.txt")}
        content = {"bench": "gpu", "machine": machine.describe(), "parts": done}
        replace(out / SUMMARY, (json.dumps(content, indent=1) + "\n").encode())
    return done


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
    return "incomplete" if part.resumes and '"left_out": ["' in _last_line(log) else WELL


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
