"""Matrix products of a model's layers with each library on a CPU: ``python -m benchmarks products``.

Each round multiplies the same matrices with every library, one after the other; figures are medians of the rounds. Time is CPU time
of all threads, which other programs on the machine change little. *Packed* weights were brought into the library's own layout
before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.engine import machine
from benchmarks.engine.records import Records
from benchmarks.engine.subject import SHAPES
from engine.demo import MODELS
from engine.models.config import ModelConfig, load_config
from kernels.linear import MKL, ONEDNN, library, pack, packed_linear

ROWS = (1, 8, 32, 128, 1920)
"""Decoding steps, and a score request of the standard workload."""
HEAD, HEAD_ROWS = "head", 32
"""The model's head, and the most rows that it is measured with: a score request needs one for each item."""
REPEATED_SECONDS = 0.02
"""A round repeats a product for this long."""
OURS = "{}, packed"
"""The way that the engine multiplies with a library."""


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks products", description="Matrix products with each library.")
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="small", help="of the layers (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of the input (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the table, the records and the summary")
    options = parser.parse_args(arguments)
    config = load_config(MODELS / "base") if options.shape == "demo" else SHAPES[options.shape]
    records, dtype = Records(), getattr(torch, options.dtype)
    table = Table("rows × in × out", title=f"GFLOP per second of CPU time, {options.shape}, {options.dtype}")
    products: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, size, out in matrices(config):
            for rows in map(int, options.rows.split(",")):
                if name == HEAD and rows > HEAD_ROWS:
                    continue
                where = f"{rows} × {size} × {out}"
                products[f"{name}, {where}"] = found = measure((rows, size, out), dtype, options.rounds)
                for way in found if not table.rows else ():
                    table.add_column(way)
                table.add_row(f"{name}, {where}", *(f"{speed:.0f}" for speed in found.values()))
    records.console.print(table)
    summary: dict[str, Any] = {
        "bench": "products",
        "machine": machine.describe(),
        "shape": options.shape,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "gflops": products,
        "chosen": (ours := OURS.format(library() if dtype == torch.float32 else ONEDNN)),
        "least_ratio": {way: least(products, ours, way) for way in next(iter(products.values())) if way != ours},
    }
    if options.out is not None:
        records.write(options.out, summary)
    print(json.dumps(summary), flush=True)
    return 0


def matrices(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Name, input and output size of each projection of a layer, and of the head."""
    hidden, inner, attended = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    yield "qkv_proj", hidden, attended + 2 * config.num_kv_heads * config.head_dim
    yield "o_proj", attended, hidden
    yield "gate_up_proj", hidden, 2 * inner
    yield "down_proj", inner, hidden
    yield HEAD, hidden, config.vocab_size


def measure(shape: tuple[int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """GFLOP per second of CPU time of each library: medians of the rounds. shape: rows, columns, output columns."""
    rows, size, out = shape
    ways = products_of(torch.randn(rows, size).to(dtype), torch.randn(out, size).to(dtype))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, multiply in ways.items():
            taken[way].append(seconds_of(multiply))
    return {way: 2e-9 * rows * size * out / statistics.median(times) for way, times in taken.items()}


def products_of(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The ways to multiply that this build of torch has; x: [rows, in], weight: [out, in], of one dtype. bfloat16: torch's own way
    is oneDNN."""
    ways: dict[str, Callable[[], Tensor]] = {
        ONEDNN: lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
        OURS.format(ONEDNN): partial(packed_linear, x, pack(weight, ONEDNN)),
        "torch": lambda: torch.nn.functional.linear(x, weight),
    }
    if x.dtype == torch.float32 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        ways[OURS.format(MKL)] = partial(packed_linear, x, pack(weight, MKL))
    return ways


def seconds_of(multiply: Callable[[], Tensor]) -> float:
    """Mean CPU seconds of a call, without the first one."""
    multiply()
    calls, start = 0, time.process_time()
    while (passed := time.process_time() - start) < REPEATED_SECONDS or not calls:
        multiply()
        calls += 1
    return passed / calls


def least(products: dict[str, dict[str, float]], ours: str, way: str) -> float:
    """The smallest ratio of our speed to that of another way."""
    return min(found[ours] / found[way] for found in products.values())
