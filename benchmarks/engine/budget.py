"""``python -m benchmarks budget``: writes the tables of docs/gpu-budget.md, the predicted time of each kernel on one H200.

Bytes, operations and launches are counted from a model's shape and from how attention is cut. The time of a launch is the longer of
its operations and its bytes, each at a stated share of the peak. A test compares the page with this program.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.engine.budget_guided import guided_table, survivors_table
from benchmarks.engine.budget_kernels import Kernel, kernels_table
from benchmarks.engine.budget_lora import adapter_programs_table, additions, shares_table
from benchmarks.engine.h200 import ATTENTION, BF16, FP8, PRODUCTS, QUANTIZED_PRODUCTS
from benchmarks.engine.subject import QWEN3_06B
from engine.models.config import ModelConfig
from engine.runner.graphs import BUCKETS, LARGE_BUCKETS
from kernels.attention_layout import NARROW, Room, cumulate, cut

PAGE = Path(__file__).parents[2] / "docs" / "gpu-budget.md"
MARK = re.compile(r"(<!-- (?P<name>[\w ]+): made by python -m benchmarks budget -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)

QUERY, ITEM, ITEMS, TOKENS = 120, 180, 10, 8192
SHORT_QUERY = 20
"""Tokens of a query that follows cached items of :data:`ITEM` tokens."""
BLOCK_ROWS, BLOCK_KEYS = 128, 64
"""Rows and keys of one block of the attention kernel in 16 bits (:mod:`kernels.paged_attention`)."""


def segments() -> tuple[list[int], list[int]]:
    """Queries and contexts of a step of :data:`TOKENS`: whole requests, and of the last one the query and as many items as fit."""
    queries: list[int] = []
    contexts: list[int] = []
    while (left := TOKENS - sum(queries)) > QUERY:
        items = min(ITEMS, (left - QUERY) // ITEM)
        queries += [QUERY, *[ITEM] * items]
        contexts += [QUERY, *[QUERY + ITEM] * items]
        if items < ITEMS:
            break
    return queries, contexts


def catalogue() -> tuple[list[int], list[int]]:
    """Queries and contexts of a step of :data:`TOKENS` that are short queries, each behind a cached item."""
    count = TOKENS // SHORT_QUERY
    return [SHORT_QUERY] * count, [ITEM + SHORT_QUERY] * count


def attention_work(
    config: ModelConfig, queries: Sequence[int], contexts: Sequence[int], block_rows: int = BLOCK_ROWS
) -> tuple[int, int]:
    """(operations of one layer that the result needs, those that the kernel computes, whose blocks are masked and padded)"""
    group, kv_heads = config.num_heads // config.num_kv_heads, config.num_kv_heads
    counts, lengths = np.array(queries, np.int64), np.array(contexts, np.int64)
    items, _, narrow = cut(cumulate(counts), cumulate(lengths), group=group, kv_heads=kv_heads, rows=block_rows)
    rows = np.where(np.arange(len(items)) < narrow, NARROW, block_rows)
    keys = -(-(items[:, 3] - items[:, 2]) // BLOCK_KEYS) * BLOCK_KEYS
    pairs = int((counts * (lengths - counts) + counts * (counts + 1) // 2).sum())
    return 4 * pairs * config.num_heads * config.head_dim, 4 * int((rows * keys).sum()) * kv_heads * config.head_dim


def step(
    config: ModelConfig,
    *,
    fp8: bool,
    last_rows: bool = True,
    slower: float = 1.0,
    work: tuple[list[int], list[int]] | None = None,
    kept: int = 2,
    block_rows: int = BLOCK_ROWS,
) -> list[Kernel]:
    """Kernels of a step of scores at capacity. last_rows: the last layer computes result rows only behind attention; slower: how
    many times as long the products take; work: queries and contexts, those of :func:`segments` unless given; kept: bytes of a
    number of keys and values."""
    queries, contexts = work or segments()
    tokens, results = sum(queries), sum(context > count for count, context in zip(queries, contexts, strict=True))
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv, head_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.head_dim
    layers, one = config.num_layers, 1 if fp8 else 2
    rate = (QUANTIZED_PRODUCTS * FP8 if fp8 else PRODUCTS * BF16) / slower
    rows = [tokens] * (layers - 1) + [results if last_rows else tokens]
    behind, every = sum(rows), layers * tokens

    def product(name: str, computed: int, size: int, out: int) -> Kernel:
        return Kernel(
            name, layers, one * (computed * size + layers * size * out) + 2 * computed * out, 2.0 * computed * size * out, rate
        )

    _, attended = attention_work(config, queries, contexts, block_rows)
    read = 4 * tokens * q + 2 * kept * sum(contexts) * kv
    kernels = [
        Kernel("embedding", 1, 4 * tokens * hidden),
        Kernel("cosine and sine of positions", 4, 5 * 4 * tokens * head_dim // 2),
        Kernel("rms_norm, add_rms_norm before attention", layers, every * hidden * (6 + one)),
        product("qkv_proj", every, hidden, q + 2 * kv),
        Kernel("qk_norm_rope_write", layers, every * (4 * q + (2 + kept) * 2 * kv + 4 * head_dim)),
        Kernel("attention", layers, layers * read, layers * attended, ATTENTION * BF16),
        *([Kernel("quantize_rows of attention", layers, behind * q * 3)] if fp8 else []),
        product("o_proj", behind, q, hidden),
        Kernel("add_rms_norm before the MLP", layers, behind * hidden * (6 + one)),
        product("gate_up_proj", behind, hidden, 2 * inner),
        Kernel("silu_mul", layers, behind * inner * (4 + one)),
        product("down_proj", behind, inner, hidden),
        Kernel("final norm", 1, 8 * rows[-1] * hidden),
        Kernel("label_logprobs", 2, 2 * config.vocab_size * hidden, 2.0 * results * config.vocab_size * hidden, ATTENTION * BF16),
    ]
    if last_rows:
        kernels.insert(-1, Kernel("rows of the last layer", 2, 4 * results * (q + hidden)))
    return kernels


def step_table(*, fp8: bool, work: tuple[list[int], list[int]] | None = None) -> str:
    """The table of one number format. work: see :func:`step`."""
    return kernels_table(step(QWEN3_06B, fp8=fp8, work=work))


def savings_table() -> str:
    """Return the table of two effects: the last layer computes fewer rows, and attention computes masked parts of its blocks."""
    lines = ["| | bf16 | FP8 |", "| --- | --- | --- |"]
    cases: dict[str, tuple[bool, float]] = {
        "predicted step, ms": (True, 1.0),
        "with all rows in the last layer, ms": (False, 1.0),
        "with products that take 1.25 times as long, ms": (True, 1.25),
        "with products that take 1.5 times as long, ms": (True, 1.5),
    }
    for name, (last_rows, slower) in cases.items():
        steps = (step(QWEN3_06B, fp8=fp8, last_rows=last_rows, slower=slower) for fp8 in (False, True))
        times = (1000 * sum(each.seconds for each in kernels) for kernels in steps)
        lines.append(f"| {name} | " + " | ".join(f"{time:.2f}" for time in times) + " |")
    needed, computed = attention_work(QWEN3_06B, *segments())
    lines.append(f"| operations of attention, computed ÷ needed | {computed / needed:.2f} | {computed / needed:.2f} |")
    return "\n".join(lines) + "\n"


def catalogue_table() -> str:
    """Return the step of a catalogue with keys and values in other formats, and with a smaller block of attention."""
    lines = [
        "| | attention, GB | attention, predicted ms | limit | step, predicted ms | items/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fp8, kept, rows in ((False, 2, 128), (False, 1, 128), (False, 2, 64), (False, 1, 64), (True, 1, 64)):
        kernels = step(QWEN3_06B, fp8=fp8, work=catalogue(), kept=kept, block_rows=rows)
        attention = next(kernel for kernel in kernels if kernel.name == "attention")
        seconds = sum(kernel.seconds for kernel in kernels)
        name = f"products in {'FP8' if fp8 else 'bf16'}, KV in {'bf16' if kept == 2 else 'FP8'}, {rows} rows a block"
        numbers = f"{attention.bytes / 1e9:.1f} | {1000 * attention.seconds:.2f} | {attention.limit} | {1000 * seconds:.2f}"
        lines.append(f"| {name} | {numbers} | {len(catalogue()[0]) / seconds:,.0f} |")
    return "\n".join(lines) + "\n"


def programs_table() -> str:
    """Programs of attention that a replayed step launches in each layer, and how many of them have work."""
    group, kv_heads = QWEN3_06B.num_heads // QWEN3_06B.num_kv_heads, QWEN3_06B.num_kv_heads
    steps = {
        "1 row after 4,000 tokens": [(1, 4000)],
        "100 rows after 400": [(1, 400)] * 100,
        "256 rows after 400": [(1, 400)] * 256,
        "a query and 4 items": [(QUERY, QUERY), *[(ITEM, QUERY + ITEM)] * 4],
        "a query and 10 items": [(QUERY, QUERY), *[(ITEM, QUERY + ITEM)] * 10],
    }
    lines = [
        "| step | bucket | small blocks | with work | large blocks | with work | merges | with work |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, shapes in steps.items():
        counts, lengths = (np.array(numbers, np.int64) for numbers in zip(*shapes, strict=True))
        items, merges, narrow = cut(cumulate(counts), cumulate(lengths), group=group, kv_heads=kv_heads, rows=BLOCK_ROWS)
        bucket = next(size for size in (*BUCKETS, *LARGE_BUCKETS) if size >= counts.sum())
        room = Room.of(bucket, group=group, kv_heads=kv_heads, rows=BLOCK_ROWS)
        numbers = [kv_heads * room.narrow, kv_heads * narrow, kv_heads * (room.items - room.narrow)]
        numbers += [kv_heads * (len(items) - narrow), room.merges, len(merges)]
        lines.append(f"| {name} | {bucket:,} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "step in bf16": lambda: step_table(fp8=False),
    "step in FP8": lambda: step_table(fp8=True),
    "savings": savings_table,
    "programs": programs_table,
    "catalogue in bf16": lambda: step_table(fp8=False, work=catalogue()),
    "catalogue": catalogue_table,
    "guided steps": guided_table,
    "survivors": survivors_table,
    "adapters": lambda: kernels_table(additions(QWEN3_06B), digits=3),
    "programs of adapters": adapter_programs_table,
    "shares of adapters": lambda: shares_table(lambda each: step(each.config, fp8=each.fp8)),
}


def page(text: str) -> str:
    """``text`` with the tables of this program."""

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found['name']]()}\n"

    return MARK.sub(written, text)


def names(text: str) -> Iterator[str]:
    """Tables that the page has."""
    return (found["name"] for found in MARK.finditer(text))


def main(arguments: Sequence[str]) -> int:
    """Write the page; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks budget", description=f"Write the tables of docs/{PAGE.name}.")
    parser.parse_args(arguments)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0
