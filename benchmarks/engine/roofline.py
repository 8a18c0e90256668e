"""Computes what a step must compute and read, from the model's shape, and measures the limits of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.kernels.int8 import int8_linear, pack
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.quantize import quantize_rows, scaled_linear

REPEATS, REPEAT_SECONDS = 30, 3.0
"""Repeats of a peak's measurement, and the time after which none is added."""
MATRIX = {"cpu": 2048, "cuda": 8192}
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}


def layer_weights(config: ModelConfig, experts: float | None = None) -> int:
    """Return the number of elements of one layer's matrices; of a layer with experts, those of ``experts`` of them, by default of
    as many as a token passes."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    if config.experts is not None:
        inner = round(config.experts.size * (experts or config.experts.chosen)) + config.experts.shared_size
    return config.hidden_size * (2 * queries + 2 * keys + 3 * inner)


def flops(config: ModelConfig, tokens: int, pairs: int, rows: int) -> int:
    """Return the operations of matrix products and attention; a multiplication and an addition count as two. ``tokens`` pass the
    layers, ``rows`` the head, and ``pairs`` are those of a query and a key that it attends to, per head and layer."""
    attention = 4 * pairs * config.num_heads * config.head_dim
    head = 2 * rows * config.hidden_size * config.vocab_size
    return layer_flops(config, tokens) + config.num_layers * attention + head


def layer_flops(config: ModelConfig, tokens: int) -> int:
    """Return the operations of the layers' matrix products only, which may be in 8 bits."""
    return config.num_layers * 2 * tokens * layer_weights(config)


def weight_bytes(config: ModelConfig, itemsize: int, tokens: float) -> int:
    """Return the bytes of every layer's matrices and of the head, which a step of ``tokens`` reads once; of the experts, those that
    as many tokens choose on average if they choose at random."""
    read = None
    if (experts := config.experts) is not None:
        read = experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens)
    return itemsize * (config.num_layers * layer_weights(config, read) + config.hidden_size * config.vocab_size)


@dataclass(frozen=True)
class Peaks:
    """Peak performance of this machine."""

    flops: float
    """Operations a second in a large matrix product of the library that the engine's layers use."""
    bandwidth: float
    """Bytes a second, read and written, of a large copy."""
    quantized_flops: float | None = None
    """``flops`` in the 8 bits of the layers' products; None if they have the model's dtype."""


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
