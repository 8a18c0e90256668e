"""The tables of docs/gpu-budget.md about guided steps."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.engine.h200 import BANDWIDTH, BF16, COPIES, PRODUCTS
from benchmarks.engine.roofline import layer_weights
from benchmarks.engine.subject import QWEN3_06B
from engine.lenvm.counted import FEW, LEAST_BRANCHES
from engine.lenvm.graphs import COUNTED_PARTS, MOST_COUNTED, PARTS
from engine.lenvm.parts import equal_parts
from engine.models.config import ModelConfig

QWEN25_7B = replace(
    QWEN3_06B,
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_heads=28,
    num_kv_heads=4,
    tied=False,
    qk_norm=False,
)
LENVM_15B = replace(
    QWEN25_7B, vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_heads=12, num_kv_heads=2, tied=True
)


COUNTED_FIXED, COUNTED_EACH = 0.31, 1.0
"""Time of the counted gate_up_proj as a share of cuBLAS's for all rows: a constant, and that for all rows needed. From an H100's
134.5 and 73.0 µs for 1,280 and 512 of 1,280 rows, where cuBLAS took 102.2 µs."""


def computed_candidates(rows: int, top_k: int = 5) -> tuple[int, int]:
    """Candidates of a pass for ``rows`` draws, captured where one fits: (with one width, a power of two; in parts)"""
    parts = equal_parts([top_k] * rows, 1 << (top_k - 1).bit_length())
    padded = (next((size for size in PARTS if size >= count), count) for count in (rows, len(parts.rows)))
    before, now = padded
    return before * (1 << (top_k - 1).bit_length()), now * int(parts.branches[0])


def decode_seconds(config: ModelConfig, rows: int) -> float:
    """A forward pass over ``rows`` tokens, without attention: its weights are read, or its products computed."""
    weights = config.num_layers * layer_weights(config) + (0 if config.tied else config.hidden_size * config.vocab_size)
    return max(2 * rows * weights / (PRODUCTS * BF16), 2 * weights / (COPIES * BANDWIDTH))


def guided_table() -> str:
    """Guided steps of a 7B model with a length model of 1.5B, five candidates a row."""
    head = [
        "rows",
        "candidates",
        "computed with width 8",
        "computed in parts",
        "bound ÷ unguided",
        "width 8 ÷ bound",
        "parts ÷ bound",
    ]
    head.append("parts ÷ unguided")
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for rows in (1, 16, 50, 100, 256, 800):
        before, now = computed_candidates(rows)
        base = decode_seconds(QWEN25_7B, rows)
        bound, wide, parts = (base + decode_seconds(LENVM_15B, count) for count in (5 * rows, before, now))
        ratios = (bound / base, wide / bound, parts / bound, parts / base)
        lines.append(f"| {rows} | {5 * rows} | {before} | {now} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines) + "\n"


def counted_seconds(config: ModelConfig, computed: int, needed: int) -> float:
    """A counted pass: gate_up_proj of the ``needed`` rows in the project's kernel, the other products of all ``computed`` ones."""
    every = decode_seconds(config, computed)
    gate_up = 2 * config.hidden_size * config.intermediate_size / layer_weights(config)
    return every * (1 + gate_up * (COUNTED_FIXED + COUNTED_EACH * needed / computed - 1))


def survivors_table() -> str:
    """Guided steps in which a row needs two of five candidates: all computed, only the needed ones, counted passes for two and for
    five needed ones, and what the engine chooses."""
    lines = [
        "| rows | all computed | needed ones | counted, two of five | counted, all needed | engine |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rows in (50, 100, 256, 800):
        base, (_, computed) = decode_seconds(QWEN25_7B, rows), computed_candidates(rows)
        passes = [decode_seconds(LENVM_15B, count) for count in (computed, 2 * rows)]
        passes += [counted_seconds(LENVM_15B, computed, count) for count in (2 * rows, 5 * rows)]
        ratios = [1 + seconds / base for seconds in passes]
        bucket = next((parts for parts in COUNTED_PARTS if parts >= rows), None)
        counted = 5 * rows >= LEAST_BRANCHES and bucket is not None and 5 * bucket <= MOST_COUNTED and FEW > 2 / 5
        ratios.append(ratios[2] if counted else ratios[0])
        lines.append(f"| {rows} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines) + "\n"
