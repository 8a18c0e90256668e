"""Time every kernel, or those named: ``python -m benchmarks kernels [NAME ...]``. Prints a table, and one line of JSON last.

With ``--out`` each row is on disk once it is measured, and a later run with ``--continue`` measures the others. A kernel that fails
is recorded and does not stop the others; where it leaves a GPU that computes nothing more, another process measures them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from benchmarks.engine.records import Store, add_output, replace
from benchmarks.kernels import lora, operations
from benchmarks.kernels.harness import Gpu, NoGpuError, NoTimeError, Row, table
from yardstick_llm.kernels.runtime import triton

logger = logging.getLogger(__name__)

BENCHMARKS = operations.BENCHMARKS | {"lora": lora.rows}
FAILED = "failed: "
"""Beginning of the key of a kernel's error."""


class LostGpuError(RuntimeError):
    """The GPU computes nothing more in this process."""


def main(arguments: Sequence[str]) -> int:
    """Print a table of the kernels that ``arguments`` name; returns the exit code, 1 without a GPU and where one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description="Time the kernels on this machine's GPU.")
    known = ", ".join(sorted(BENCHMARKS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to time, everything unless given: {known}")
    add_output(parser)
    parsed = parser.parse_args(arguments)
    chosen = parsed.names or sorted(BENCHMARKS)
    if unknown := sorted(set(chosen) - set(BENCHMARKS)):
        parser.error(f"there is no benchmark named {', '.join(unknown)}; there are {known}")
    store = Store(parsed.out, resume=parsed.resume, limit=parsed.limit)
    try:
        report = measure(chosen, store)
    except NoGpuError as error:
        print(error, file=sys.stderr)
        return 1
    except LostGpuError:
        if store.folder is None:
            raise
        _restart([*chosen, "--out", str(parsed.out), "--continue", "--limit", str(store.left)])
    if store.folder is not None:
        replace(store.folder / "summary.json", (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps(report))
    return int(bool(report["failed"]))


def _restart(arguments: Sequence[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "kernels", *arguments])  # noqa: S606 - no shell is wanted


def measure(chosen: Sequence[str], store: Store) -> dict[str, Any]:
    """Print the table of the kernels, and return all numbers. Raises NoGpuError, and LostGpuError behind a stored error."""
    rows: list[Row] = []
    report: dict[str, Any] = {"versions": {"torch": torch.__version__, "triton": triton.__version__}, "left_out": store.left_out}
    with suppress(NoTimeError):
        gpu = Gpu.measured(store)
        report["gpu"] = {"name": gpu.name, "bandwidth": gpu.bandwidth, "flops": gpu.flops}
        print(f"{gpu.name}: {gpu.bandwidth / 1e9:.0f} GB/s copied, {gpu.flops / 1e12:.0f} TFLOP/s in bfloat16\n")
        for name in chosen:
            if FAILED + name not in store.results:
                _measure(name, gpu, rows)
    print(table(rows), "\n")
    failed = {key.removeprefix(FAILED): said for key, said in store.results.items() if key.startswith(FAILED)}
    return report | {"rows": [asdict(row) for row in rows], "failed": failed}


def _measure(name: str, gpu: Gpu, rows: list[Row]) -> None:
    """Add the rows of one benchmark to ``rows``, and store its error if it has one. Raises LostGpuError."""
    try:
        with suppress(NoTimeError):
            for row in BENCHMARKS[name](gpu):
                rows.append(row)
    except Exception as error:  # of CUDA or of Triton's compiler
        logger.exception("the benchmark of %s failed", name)
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        gpu.store.measure(FAILED + name, 0, lambda: said)
        if not gpu.works():
            raise LostGpuError(name) from error
