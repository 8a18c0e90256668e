"""Computes what scoring must compute and move, from the model's shape, and measures the limits of this machine.

Percentages of a limit show the remaining potential on one machine; they are not comparable between machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.engine.load import Workload
from engine.models.config import ModelConfig
from kernels.int8 import int8_linear, pack
from kernels.linear import linear
from kernels.quantize import quantize_rows, scaled_linear

REPEATS, REPEAT_SECONDS = 30, 3.0
"""Repeats of a peak's measurement, and the time after which none is added."""
MATRIX = {"cpu": 2048, "cuda": 8192}
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}


@dataclass(frozen=True)
class Work:
    """Amount of work for a model, independent of its shape."""

    tokens: int
    """Tokens through the layers."""
    pairs: int
    """Pairs of a query and a key that it attends to, per head and layer."""
    rows: int
    """Rows through the head."""
    context: int
    """Keys that attention must read, per head and layer, once for every prompt that has them."""

    @classmethod
    def shared(cls, workload: Workload) -> Work:
        """Return the work of a request whose query is computed once."""
        query, item, items = workload.query, workload.item, workload.items
        pairs = query * (query + 1) // 2 + items * (item * query + item * (item + 1) // 2)
        return cls(workload.tokens, pairs, items, query + items * (query + item))

    @classmethod
    def alone(cls, workload: Workload) -> Work:
        """Return the work of a request in which every item is a full prompt."""
        prompt, items = workload.query + workload.item, workload.items
        return cls(items * prompt, items * prompt * (prompt + 1) // 2, items, items * prompt)


def layer_weights(config: ModelConfig) -> int:
    """Return the number of elements of one layer's matrices."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)


def flops(config: ModelConfig, work: Work) -> int:
    """Return the operations of matrix products and attention; a multiplication and an addition count as two."""
    attention = 4 * work.pairs * config.num_heads * config.head_dim
    head = 2 * work.rows * config.hidden_size * config.vocab_size
    return layer_flops(config, work) + config.num_layers * attention + head


def layer_flops(config: ModelConfig, work: Work) -> int:
    """Return the operations of the layers' matrix products only, which may be in 8 bits."""
    return config.num_layers * 2 * work.tokens * layer_weights(config)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of every layer's matrices and of the head, which a step reads once."""
    return itemsize * (config.num_layers * layer_weights(config) + config.hidden_size * config.vocab_size)


def elementwise_bytes(config: ModelConfig, work: Work, itemsize: int, *, quantized: bool = False) -> int:
    """Return the bytes moved between matrix products if one kernel does all work between two of them; nothing can overlap them.

    A token and a layer: queries, keys and values are read, rotated and written; attention reads queries and writes its output; the
    two sums with the residual read two rows and write two; SiLU·mul reads two rows and writes one. Attention reads its context.
    In 8 bits, what a product reads is written in one byte, and attention's output is read and written once more to get there.
    """
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = 2 * config.hidden_size + config.intermediate_size
    others = 2 * (queries + 2 * keys) + 2 * queries + 6 * config.hidden_size + 2 * config.intermediate_size
    token = itemsize * (others + queries) + products + queries if quantized else itemsize * (others + products)
    return config.num_layers * (work.tokens * token + itemsize * work.context * 2 * keys)


@dataclass(frozen=True)
class Peaks:
    """Peak performance of this machine."""

    flops: float
    """Operations a second in a large matrix product of the library that the engine's layers use."""
    bandwidth: float
    """Bytes a second, read and written, of a large copy."""
    quantized_flops: float | None = None
    """``flops`` in the 8 bits of the layers' products; None if they have the model's dtype."""

    def or_better(self, other: Peaks) -> Peaks:
        """Return the best of two measurements, because other work can slow the machine down."""
        both = self.quantized_flops, other.quantized_flops
        quantized = None if both[0] is None or both[1] is None else max(both[0], both[1])
        return Peaks(max(self.flops, other.flops), max(self.bandwidth, other.bandwidth), quantized)


def measure_peaks(device: torch.device, dtype: torch.dtype, quantize: str | None = None) -> Peaks:
    """Return the best of some repeats, which is the speed of the machine without other work."""
    peaks = _peaks(device, dtype, quantize)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # an engine that is built later takes what is free
    return peaks


def _peaks(device: torch.device, dtype: torch.dtype, quantize: str | None) -> Peaks:
    size = MATRIX[device.type]
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    product = min(_times(lambda: linear(left, right), device))
    copy = min(_times(lambda: target.copy_(source), device))
    quantized = None
    if quantize == "fp8":
        codes = *quantize_rows(left), *quantize_rows(right)
        quantized = 2 * size**3 / min(_times(lambda: scaled_linear(*codes, dtype=dtype), device))
    elif quantize == "int8":
        weight = pack(right)
        quantized = 2 * size**3 / min(_times(lambda: int8_linear(left, weight), device))
    return Peaks(2 * size**3 / product, 2 * COPIED_BYTES[device.type] / copy, quantized)


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of each repeat, without the first."""
    times = list[float]()
    begun = time.perf_counter()
    while len(times) <= REPEATS and (len(times) < 3 or time.perf_counter() - begun < REPEAT_SECONDS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def roofline(config: ModelConfig, dtype: str, workload: Workload, peaks: Peaks, request_seconds: float) -> dict[str, float]:
    """Compare a request of ``workload`` that took ``request_seconds`` with the limits."""
    itemsize, quantized = getattr(torch, dtype).itemsize, peaks.quantized_flops is not None
    shared, alone = Work.shared(workload), Work.alone(workload)
    needed, layers = flops(config, shared), layer_flops(config, shared)
    elementwise = elementwise_bytes(config, shared, itemsize, quantized=quantized)
    of_layers = peaks.quantized_flops or peaks.flops
    products = layers / of_layers + (needed - layers) / peaks.flops
    return {
        "gflop_an_item": needed / workload.items / 1e9,
        "gflop_an_item_alone": flops(config, alone) / workload.items / 1e9,
        "mb_a_request_between_products": elementwise / 1e6,
        "peak_gflops": peaks.flops / 1e9,
        "peak_gflops_of_layers": of_layers / 1e9,
        "peak_gb_per_s": peaks.bandwidth / 1e9,
        "percent_of_peak_flops": 100 * products / request_seconds,
        "limit_items_per_s": workload.items / products,
        "limit_items_per_s_with_elementwise": workload.items / (products + elementwise / peaks.bandwidth),
    }
