"""Predicted additions of LoRA adapters to a step, for :mod:`benchmarks.engine.budget`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.engine.budget_kernels import Kernel
from benchmarks.engine.h200 import ATTENTION, BANDWIDTH, BF16, COPIES
from benchmarks.engine.subject import QWEN3_06B, QWEN3_8B
from engine.models.config import ModelConfig
from kernels.lora_layout import ROW_BLOCKS, most_blocks
from kernels.lora_tiles import RANK_TILE

ITEMS, TOKENS = 43, 192
"""Items of the step, and tokens of each."""
ADAPTERS, RANK = 16, 16
SHRINK_TILE = 64
"""Columns that the shrink kernel computes at least."""
GATE_TILE = 128
"""Columns of a program of the gate with additions."""
DECODED, MAX_RANK = 64, 64
"""Rows of a decoding step, and the largest rank that its graph has room for."""
GOAL = 0.15
"""Share of a step without adapters that additions may take."""


READERS = {"qk_norm_rope_write": 4, "silu_mul": 3}
"""Operations that make additions, and bytes that they move without them for each number of the product."""


def additions(config: ModelConfig, rank: int = RANK, *, fused: bool = True, fp8: bool = False) -> list[Kernel]:
    """Kernels of the additions in one step. ``fused``: additions to the large products are made in the operations behind them, as
    far as these can. ``fp8``: the base's products are in FP8, whose inputs are codes but for ``o_proj``.

    A step without adapters has the launches and the other bytes of these operations as well.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    every = layers * ITEMS * TOKENS
    behind = every - ITEMS * (TOKENS - 1)  # the last layer computes the rows that are read
    found = []
    for name, rows, inputs, parts, outputs, reader in (
        ("qkv_proj", every, hidden, 3, q + 2 * kv, "qk_norm_rope_write"),
        ("o_proj", behind, q, 1, hidden, None),
        ("gate_up_proj", behind, hidden, 2, 2 * inner, "silu_mul"),
        ("down_proj", behind, inner, 1, hidden, None),
    ):
        shrunk, matrices = rows * parts * rank, layers * ADAPTERS * rank
        computed = -(-parts * rank // SHRINK_TILE) * SHRINK_TILE
        read = (1 if fp8 and name != "o_proj" else 2) * rows * inputs + 2 * (shrunk + matrices * parts * inputs)
        found.append(Kernel(f"shrink of {name}", layers, read, 2.0 * rows * inputs * computed, ATTENTION * BF16))
        flops = 2.0 * rows * outputs * -(-rank // RANK_TILE) * RANK_TILE
        read = 2 * (shrunk + matrices * outputs)
        if fused and reader is not None and not (fp8 and reader == "silu_mul"):
            found.append(_within(reader, name, rows * outputs, read, flops))
        else:
            found.append(Kernel(f"expand of {name}", layers, read + 4 * rows * outputs, flops, ATTENTION * BF16))
    return found


def _within(reader: str, name: str, numbers: int, read: float, flops: float) -> Kernel:
    """Additions to ``numbers`` numbers of a product in the operation behind it."""
    hidden = READERS[reader] * numbers / (COPIES * BANDWIDTH)
    return Kernel(f"expand of {name} in {reader}", 0, read, flops, ATTENTION * BF16, hidden)


class Subject(NamedTuple):
    """A model with adapters of one rank."""

    name: str
    config: ModelConfig
    rank: int = RANK
    fp8: bool = False


SUBJECTS = [
    *(Subject("Qwen3-0.6B", QWEN3_06B, rank) for rank in (16, 64, 128)),
    Subject("Qwen3-0.6B in FP8", QWEN3_06B, fp8=True),
    *(Subject("Qwen3-8B", QWEN3_8B, rank) for rank in (16, 64, 128)),
    Subject("Qwen3-8B in FP8", QWEN3_8B, fp8=True),
]


def shares_table(step: Callable[[Subject], Sequence[Kernel]]) -> str:
    """Additions to steps of :data:`SUBJECTS`. ``step``: the step without adapters.

    The last column is the rate of bytes, as a share of the peak, at which the operations that make additions must run for the goal.
    """
    lines = [
        "| model, rank | step without adapters, ms | additions apart, ms | share | additions as made, ms | share | rate for 15 % |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for subject in SUBJECTS:
        kernels, (name, config, rank, fp8) = step(subject), subject
        whole = _seconds(kernels)
        apart, made = (additions(config, rank, fused=fused, fp8=fp8) for fused in (False, True))
        making = [reader for reader in READERS if any(kernel.name.endswith(f" in {reader}") for kernel in made)]
        readers = sum(kernel.seconds for kernel in kernels if kernel.name in making)
        left = GOAL * whole - _seconds(made)
        rate = f"{COPIES * readers / (readers + left):.2f}" if left > 0 else "none"
        cells = [f"{1000 * whole:.2f}", *(f"{1000 * each:.2f} | {each / whole:.0%}" for each in map(_seconds, (apart, made))), rate]
        lines.append(f"| {name}, {rank} | " + " | ".join(cells).replace("%", " %") + " |")
    return "\n".join(lines) + "\n"


def adapter_programs_table() -> str:
    """Programs of a replayed decoding step in which each adapter has few rows, and how many of them have work."""
    config, size = QWEN3_06B, ROW_BLOCKS[0]
    blocks = most_blocks(DECODED, ADAPTERS, size)
    heads = config.num_heads + 2 * config.num_kv_heads
    tiles = {
        f"shrink of qkv_proj, `--max-lora-rank` {MAX_RANK}": (3 * MAX_RANK // SHRINK_TILE, 1),
        "qk_norm_rope_write with additions": (heads, heads),
        "silu_mul with additions": (config.intermediate_size // GATE_TILE, config.intermediate_size // GATE_TILE),
    }
    lines = ["| kernel | programs | with work |", "| --- | --- | --- |"]
    lines += [f"| {name} | {blocks * room:,} | {ADAPTERS * used:,} |" for name, (room, used) in tiles.items()]
    return "\n".join(lines) + "\n"


def _seconds(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.seconds for kernel in kernels)
