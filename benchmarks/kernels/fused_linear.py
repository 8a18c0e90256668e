"""Products with what follows them in the same kernel, beside cuBLAS's product and the kernel that would follow it.

``python -m benchmarks.kernels.fused_linear`` times tiles of other sizes, to choose those of the launchers: it prints a line
for each candidate, and a table last. Times there are of replayed CUDA graphs, and a wrong result is an error of its candidate.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.harness import Gpu, Row, mark
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.linear_qk_norm_rope import linear_qk_norm_rope_reference, linear_qk_norm_rope_triton
from yardstick_llm.kernels.linear_silu_mul import linear_silu_mul_reference, linear_silu_mul_triton
from yardstick_llm.kernels.product_tiles import Tiles
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write
from yardstick_llm.kernels.quantize import quantize_rows, scaled_linear
from yardstick_llm.kernels.silu_mul import silu_mul

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
"""Qwen3-0.6B."""


@dataclass(frozen=True)
class Case:
    """One operation on rotated inputs, so that none finds its inputs in the level-2 cache."""

    name: str
    flops: float
    run: Callable[[int, Tiles | None], list[Tensor]]
    """Launch the kernel on one of the inputs and return what it wrote."""
    expected: Callable[[], list[Tensor]]
    """The expected output for input 0, from sums in float32."""
    peers: dict[str, Callable[[int], Any]]
    candidates: tuple[Tiles, ...]


COPIES = 4


def rows(gpu: Gpu) -> Iterator[Row]:
    """Yield rows for Qwen3-0.6B's products in large steps."""
    for tokens in (8192, 16384):
        for case in (gated(tokens), qkv(tokens), qkv(tokens, fp8=True)):
            shape = f"[{tokens}, {HIDDEN}]"
            yield gpu.computed(f"{case.name}, fused", shape, case.flops, partial(case.run, 0, None))
            for name, peer in case.peers.items():
                yield gpu.computed(f"{case.name}, {name}", shape, case.flops, partial(peer, 0))


def gated(tokens: int) -> Case:
    """The gate and up projections with SwiGLU."""
    xs = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(COPIES)]
    weight = (torch.randn(2 * INTERMEDIATE, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
    return Case(
        f"linear_silu_mul {tokens}",
        2 * tokens * weight.numel(),
        lambda i, tiles: [linear_silu_mul_triton(xs[i], weight, tiles=tiles)],
        lambda: [linear_silu_mul_reference(xs[0].float(), weight.float())],
        {"product": lambda i: linear(xs[i], weight), "product and silu_mul": lambda i: silu_mul(linear(xs[i], weight))},
        GATED_CANDIDATES,
    )


def qkv(tokens: int, *, fp8: bool = False) -> Case:
    """The projections to queries, keys and values with QK-norm, rotation and the write to slots."""
    xs = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(COPIES)]
    weight = (torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
    norms = torch.rand(2, HEAD_DIM, device="cuda").add(0.5).bfloat16()
    angles = torch.randn(tokens, HEAD_DIM // 2, device="cuda") * 10
    cos, sin = angles.cos(), angles.sin()
    caches = torch.zeros(COPIES, 2, tokens, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    slots = torch.randperm(tokens, device="cuda")
    codes = [quantize_rows(x) for x in xs]
    weight_codes, weight_scales = quantize_rows(weight)

    Given = tuple[None, Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor, Tensor]

    def given(i: int, caches: Tensor = caches) -> Given:
        return None, norms[0], norms[1], 1e-6, cos, sin, caches[i, 0], caches[i, 1], slots

    def run(i: int, tiles: Tiles | None) -> list[Tensor]:
        if fp8:
            q = linear_qk_norm_rope_triton(
                codes[i][0], weight_codes, *given(i), x_scales=codes[i][1], weight_scales=weight_scales, tiles=tiles
            )
        else:
            q = linear_qk_norm_rope_triton(xs[i], weight, *given(i), tiles=tiles)
        return [q, *caches[i]]

    def expected() -> list[Tensor]:
        x, w = xs[0].float(), weight.float()
        if fp8:
            x, w = codes[0][0].float() * codes[0][1], weight_codes.float() * weight_scales
        wide = caches[:1].float()
        return [linear_qk_norm_rope_reference(x, w, *given(0, wide)), *wide[0]]

    def product(i: int) -> Tensor:
        if fp8:
            return scaled_linear(codes[i][0], codes[i][1], weight_codes, weight_scales)
        return linear(xs[i], weight)

    def both(i: int) -> Tensor:
        return qk_norm_rope_write(product(i).view(tokens, -1, HEAD_DIM), *given(i)[1:])

    name = f"linear_qk_norm_rope{' fp8' if fp8 else ''} {tokens}"
    peers: dict[str, Callable[[int], Any]] = {"product": product, "product and qk_norm_rope_write": both}
    return Case(name, 2 * tokens * weight.numel(), run, expected, peers, FP8_CANDIDATES if fp8 else QKV_CANDIDATES)


COMMON = (
    Tiles(128, 256, 64, 3, 8),
    Tiles(128, 256, 64, 3, 8, group=16),
    Tiles(128, 256, 64, 3, 8, group=4),
    Tiles(128, 256, 64, 4, 8, resident=0),
    Tiles(128, 128, 64, 3, 4, resident=2),
    Tiles(128, 128, 64, 3, 4, resident=0),
    Tiles(128, 128, 64, 4, 8, resident=0),
    Tiles(256, 128, 64, 4, 8, resident=0),
    Tiles(64, 256, 64, 2, 4, resident=2),
    Tiles(64, 256, 64, 2, 4, resident=0),
    Tiles(128, 256, 64, 3, 8, tma=False, resident=0),
    Tiles(128, 128, 64, 3, 4, tma=False, resident=0),
)
GATED_CANDIDATES = (
    *COMMON,
    Tiles(128, 256, 64, 4, 8),
    Tiles(128, 256, 64, 3, 4, specialized=True),
    Tiles(128, 256, 64, 4, 4, specialized=True),
    Tiles(128, 128, 64, 4, 4, specialized=True),
)
QKV_CANDIDATES = (*COMMON, Tiles(128, 256, 64, 2, 8), Tiles(128, 256, 64, 3, 8, resident=0))
FP8_CANDIDATES = tuple(replace(tiles, step=2 * tiles.step) for tiles in QKV_CANDIDATES)

TOLERANCE = 0.02
"""Largest relative error of a result, as a Frobenius norm: that of bfloat16 is 0.002."""


@dataclass
class Sweep:
    """Times candidates."""

    found: list[tuple[str, float, float, str]]

    def run(self) -> None:
        """Compile everything at once and time it."""
        cases = [gated(8192), qkv(8192), qkv(8192, fp8=True)]
        self.compile(cases)
        for case in cases:
            for name, peer in case.peers.items():
                self.record(case, name, partial(_timed, peer))
        # The specialized ones are last: one that hangs ends the sweep.
        pairs = [(case, tiles) for case in cases for tiles in case.candidates]
        for case, tiles in sorted(pairs, key=lambda pair: pair[1].specialized):
            self.candidate(case, tiles)

    def compile(self, cases: list[Case]) -> None:
        from triton.runtime.jit import JITFunction

        def only_compile(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
            return partial(kernel.run, grid=grid, warmup=True)

        start = time.perf_counter()
        for case in cases:
            for name, peer in case.peers.items():
                _attempt(f"{case.name}: {name}", partial(peer, 0))
        with mock.patch.object(JITFunction, "__getitem__", only_compile), ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {pool.submit(case.run, 0, tiles): (case, tiles) for case in cases for tiles in case.candidates}
            for job in as_completed(jobs):
                case, tiles = jobs[job]
                _attempt(f"{case.name}: {_said(tiles)}: compiling", job.result)
        print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)

    def candidate(self, case: Case, tiles: Tiles) -> None:
        def measure() -> float:
            for tensor in (wrote := case.run(0, tiles)):
                tensor.fill_(float("nan"))
            del wrote
            wrote = case.run(0, tiles)
            for found, expected in zip(wrote, case.expected(), strict=True):
                error = float((found.float() - expected).norm() / expected.norm())
                if not error < TOLERANCE:
                    raise ValueError(f"wrong: relative error {error:.3g}")
            return _timed(lambda i: case.run(i, tiles))

        self.record(case, _said(tiles), measure)

    def record(self, case: Case, said: str, measure: Callable[[], float]) -> None:
        seconds = _attempt(f"{case.name}: {said}", measure)
        if seconds is not None:
            self.found.append((case.name, seconds, case.flops / seconds / 1e12, said))
            print(_line(self.found[-1]), flush=True)

    def report(self) -> None:
        print("\nsorted:")
        for row in sorted(self.found):
            print(_line(row))
        sys.stdout.flush()


def _line(row: tuple[str, float, float, str]) -> str:
    name, seconds, rate, said = row
    return f"{name:<32} {seconds * 1e6:8.1f} µs {rate:6.0f} TFLOP/s  {said}"


def _said(tiles: Tiles) -> str:
    kind = f"{'TMA' if tiles.tma else 'pointers'}{', specialized' if tiles.specialized else ''}"
    return (
        f"{tiles.rows} x {tiles.columns} x {tiles.step}, {tiles.stages} stages, {tiles.warps} warps, group {tiles.group},"
        f" resident {tiles.resident}, {kind}"
    )


def _attempt(what: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # of CUDA, of Triton's compiler or of a wrong result
        print(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        return None


def _timed(run: Callable[[int], Any], repeats: int = 15) -> float:
    """Median seconds of a launch in replays of a CUDA graph of two rounds over all inputs."""
    for i in range(COPIES):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(2 * COPIES):
            run(i % COPIES)
    marks = [mark() for _ in range(repeats + 1)]
    graph.replay()
    graph.replay()
    for each in marks:
        each.record()
        graph.replay()
    torch.cuda.synchronize()
    return median(float(a.elapsed_time(b)) for a, b in pairwise(marks)) / (2 * COPIES) / 1e3


def main() -> None:
    """Sweep for a number of seconds, and end even where a kernel hangs."""
    parser = argparse.ArgumentParser(description="Time tiles of the fused products.")
    parser.add_argument("--seconds", type=float, default=100.0)
    seconds = parser.parse_args().seconds
    sweep = Sweep([])

    def end() -> None:
        print("out of time")
        sweep.report()
        os._exit(0)

    watchdog = threading.Timer(seconds, end)
    watchdog.daemon = True
    watchdog.start()
    sweep.run()
    watchdog.cancel()
    sweep.report()
    os._exit(0)


if __name__ == "__main__":
    main()
