"""Run every benchmark, or those named: ``python -m kernels.bench [NAME ...]``. A table, and one line of JSON last."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from dataclasses import asdict
from importlib import import_module

import torch

import kernels.bench
from kernels.bench.harness import Gpu, NoGpuError, table
from kernels.runtime import triton

NO_BENCHMARKS = {"__main__", "harness"}


def names() -> list[str]:
    """The benchmarks there are."""
    return sorted({module.name for module in pkgutil.iter_modules(kernels.bench.__path__)} - NO_BENCHMARKS)


def main() -> None:
    """Print the table of what was asked for; exit with 1 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Time the kernels on this machine's GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to time, everything unless given: {', '.join(names())}")
    chosen = parser.parse_args().names or names()
    if unknown := sorted(set(chosen) - set(names())):
        parser.error(f"there is no benchmark named {', '.join(unknown)}; there are {', '.join(names())}")
    try:
        gpu = Gpu.measured()
    except NoGpuError as error:
        sys.exit(str(error))
    print(f"{gpu.name}: {gpu.bandwidth / 1e9:.0f} GB/s copied, {gpu.flops / 1e12:.0f} TFLOP/s in bfloat16\n")
    rows = [row for name in chosen for row in import_module(f"kernels.bench.{name}").rows(gpu)]
    print(table(rows), "\n")
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"gpu": asdict(gpu), "versions": versions, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
