"""Benchmarks of the kernels at the sizes of Qwen2.5 and Qwen3, by the names of the kernels' modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.harness import Gpu, Row
from yardstick_llm.kernels.attention_layout import Room, lay_out
from yardstick_llm.kernels.block_scaled import block_scaled_linear, quantize_groups
from yardstick_llm.kernels.branch_attention import branch_attention
from yardstick_llm.kernels.candidates import candidates
from yardstick_llm.kernels.counted_linear import counted_linear
from yardstick_llm.kernels.grouped_experts import block_pairs, grouped_linear
from yardstick_llm.kernels.keep_thresholds import keep_thresholds
from yardstick_llm.kernels.label_logprobs import label_logprobs
from yardstick_llm.kernels.largest import token_logprobs
from yardstick_llm.kernels.length_tilt import RULES, Tilts, length_tilt
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.linear_qk_norm_rope import linear_qk_norm_rope_triton
from yardstick_llm.kernels.linear_silu_mul import linear_silu_mul_triton
from yardstick_llm.kernels.paged_attention import block_rows, paged_attention
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write
from yardstick_llm.kernels.quantize import FP8, quantize_rows, scaled_linear, supported
from yardstick_llm.kernels.rms_norm import add_rms_norm, add_rms_norm_quantized, rms_norm
from yardstick_llm.kernels.seeded_sampling import seeded_choice, seeded_draw
from yardstick_llm.kernels.silu_mul import silu_mul, silu_mul_quantized
from yardstick_llm.kernels.token_bits import exclude_
from yardstick_llm.kernels.weight_only import Codes, half_of, weight_only_linear

Rows = Callable[[Gpu], Iterator[Row]]
BENCHMARKS: dict[str, Rows] = {}
VOCAB = 151_936
SLOTS = 600_000


def benchmark(name: str) -> Callable[[Rows], Rows]:
    """Add a function to :data:`BENCHMARKS`."""

    def add(rows: Rows) -> Rows:
        BENCHMARKS[name] = rows
        return rows

    return add


def random(*shape: int) -> Tensor:
    """Random bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda").bfloat16()


def nearer(gpu: Gpu, name: str, shape: str, bytes_read: float, operations: float, run: Callable[[], Any]) -> Row:
    """Compare with the nearer limit: reading, or computing."""
    if bytes_read / gpu.bandwidth > operations / gpu.flops:
        return gpu.moved(name, shape, bytes_read, run)
    return gpu.computed(name, shape, operations, run)


@benchmark("rms_norm")
def _rms_norm(gpu: Gpu) -> Iterator[Row]:
    """Hidden rows of a large step and of a decoding step, and heads; alone, with a residual, and to FP8."""
    eps = 1e-6
    for shape in ((8192, 1024), (8192, 4096), (8192, 16, 128), (128, 1024)):
        x, weight = random(*shape), torch.ones(shape[-1], device="cuda").bfloat16()
        yield gpu.moved("rms_norm", str(list(shape)), 4 * x.numel(), partial(rms_norm, x, weight, eps))
        if len(shape) == 2:
            given = x, random(*shape), weight, eps
            yield gpu.moved("add_rms_norm", str(list(shape)), 8 * x.numel(), partial(add_rms_norm, *given))
            yield gpu.moved("add_rms_norm_quantized", str(list(shape)), 7 * x.numel(), partial(add_rms_norm_quantized, *given))


@benchmark("silu_mul")
def _silu_mul(gpu: Gpu) -> Iterator[Row]:
    """The gate of the feed-forward layer of Qwen3-0.6B and Qwen2.5-7B, and of a decoding step; alone and to FP8."""
    for tokens, size in ((8192, 3072), (8192, 18944), (128, 3072)):
        gate_up, shape = random(tokens, 2 * size), f"[{tokens}, 2 · {size}]"
        yield gpu.moved("silu_mul", shape, 6 * tokens * size, partial(silu_mul, gate_up))
        yield gpu.moved("silu_mul_quantized", shape, 5 * tokens * size, partial(silu_mul_quantized, gate_up))


@benchmark("qk_norm_rope")
def _qk_norm_rope(gpu: Gpu) -> Iterator[Row]:
    """The heads of Qwen3-0.6B and, without the norm, of Qwen2.5-7B."""
    for tokens, heads, kv_heads, normed in ((8192, 16, 8, True), (128, 16, 8, True), (8192, 28, 4, False)):
        qkv, angles = random(tokens, heads + 2 * kv_heads, 128), torch.randn(tokens, 64, device="cuda")
        weight = torch.ones(128, device="cuda").bfloat16() if normed else None
        keys, values = torch.zeros(2, 2 * tokens, kv_heads, 128, device="cuda").bfloat16()
        slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
        run = partial(qk_norm_rope_write, qkv, weight, weight, 1e-6, angles.cos(), angles.sin(), keys, values, slots)
        moved = 4 * qkv.numel() + 8 * angles.numel() + 8 * tokens
        yield gpu.moved("qk_norm_rope_write", f"[{tokens}, {heads} + 2 · {kv_heads}, 128]", moved, run)


@benchmark("quantize")
def _quantize(gpu: Gpu) -> Iterator[Row]:
    """The projections of Qwen3-0.6B and a layer of 4096. Percentages are of bfloat16's peak; FP8's is twice that. One scale for
    each matrix is less exact than one for each row, so it is worth having only if it is faster."""
    one = torch.ones((), device="cuda")
    for size in (1024, 2048, 4096):
        x = random(8192, size)
        yield gpu.moved("quantize_rows", f"[8192, {size}]", 3 * x.numel(), partial(quantize_rows, x))
    for size, out in ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (4096, 4096)):
        x, weight = random(8192, size), random(out, size)
        shape, operations = f"[8192, {size}] · [{out}, {size}]ᵀ", 2 * 8192 * size * out
        yield gpu.computed("linear, bfloat16", shape, operations, partial(linear, x, weight))
        if supported(x.device):
            given = *quantize_rows(x), *quantize_rows(weight)
            yield gpu.computed("scaled_linear", shape, operations, partial(scaled_linear, *given))
            scaled: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": x.dtype, "use_fast_accum": True}
            run = partial(torch._scaled_mm, given[0], given[2].t(), **scaled)
            yield gpu.computed("scaled_linear, one scale", shape, operations, run)


@benchmark("residual")
def _residual(gpu: Gpu) -> Iterator[Row]:
    """The residual of Qwen3-0.6B, added by the norm behind o_proj and down_proj, as in the engine, or in place by their product."""

    def by_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> None:
        add_rms_norm(linear(x, weight), residual, norm, 1e-6)

    def by_product(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> None:
        rms_norm(residual.addmm_(x, weight.t()), norm, 1e-6)

    for size in (2048, 3072):
        given = random(8192, size), random(1024, size) / size**0.5, random(8192, 1024), random(1024)
        for name, run in (("linear, add_rms_norm", by_norm), ("addmm_, rms_norm", by_product)):
            yield gpu.computed(name, f"[8192, {size}] · [1024, {size}]ᵀ", 2 * 8192 * size * 1024, partial(run, *given))


@benchmark("fused_linear")
def _fused_linear(gpu: Gpu) -> Iterator[Row]:
    """Products of Qwen3-0.6B with what follows them in the same kernel, beside cuBLAS's product and the kernel that follows it."""
    for tokens in (8192, 16384):
        yield from _fused(gpu, tokens)


def _fused(gpu: Gpu, tokens: int, hidden: int = 1024, heads: int = 16, kv_heads: int = 8, head_dim: int = 128) -> Iterator[Row]:
    x, gate_up = random(tokens, hidden), random(6 * hidden, hidden) / hidden**0.5
    weight = random((heads + 2 * kv_heads) * head_dim, hidden) / hidden**0.5
    (one, other), angles = random(2, head_dim), torch.randn(tokens, head_dim // 2, device="cuda") * 10
    keys, values = torch.zeros(2, tokens, kv_heads, head_dim, device="cuda").bfloat16()
    given = one, other, 1e-6, angles.cos(), angles.sin(), keys, values, torch.randperm(tokens, device="cuda")
    (codes, scales), (weight_codes, weight_scales) = quantize_rows(x), quantize_rows(weight)
    gate_up_codes, gate_up_scales = quantize_rows(gate_up)
    in_fp8: dict[str, Any] = {"x_scales": scales, "weight_scales": weight_scales}

    def rotated(qkv: Tensor) -> Tensor:
        return qk_norm_rope_write(qkv.view(tokens, -1, head_dim), *given)

    def product() -> Tensor:
        return scaled_linear(codes, scales, weight_codes, weight_scales)

    def gate_up_product() -> Tensor:
        return scaled_linear(codes, scales, gate_up_codes, gate_up_scales)

    def gated() -> Tensor:
        return linear_silu_mul_triton(codes, gate_up_codes, None, scales, gate_up_scales)

    runs: dict[str, Callable[[], Any]] = {
        "linear_silu_mul, fused": partial(linear_silu_mul_triton, x, gate_up),
        "linear_silu_mul, product": partial(linear, x, gate_up),
        "linear_silu_mul, product and silu_mul": lambda: silu_mul(linear(x, gate_up)),
        "linear_silu_mul fp8, fused": gated,
        "linear_silu_mul fp8, fused, and quantize_rows": lambda: quantize_rows(gated()),
        "linear_silu_mul fp8, product": gate_up_product,
        "linear_silu_mul fp8, product and silu_mul_quantized": lambda: silu_mul_quantized(gate_up_product()),
        "linear_qk_norm_rope, fused": partial(linear_qk_norm_rope_triton, x, weight, None, *given),
        "linear_qk_norm_rope, product": partial(linear, x, weight),
        "linear_qk_norm_rope, product and qk_norm_rope_write": lambda: rotated(linear(x, weight)),
        "linear_qk_norm_rope fp8, fused": partial(linear_qk_norm_rope_triton, codes, weight_codes, None, *given, **in_fp8),
        "linear_qk_norm_rope fp8, product": product,
        "linear_qk_norm_rope fp8, product and qk_norm_rope_write": lambda: rotated(product()),
    }
    for name, run in runs.items():
        columns = (gate_up if "silu" in name else weight).numel()
        yield gpu.computed(name, f"[{tokens}, {hidden}]", 2 * tokens * columns, run)


@benchmark("weight_only")
def _weight_only(gpu: Gpu) -> Iterator[Row]:
    """4 bits in groups of 128 and FP8 in blocks, at a layer of 4096 and the gate and up of Qwen2.5-7B, beside bfloat16."""
    for size, out in ((4096, 4096), (3584, 37888)):
        packed = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8, device="cuda")
        halves = Codes(packed, random(out, size // 128), half=half_of(size, 128) or 0)
        dense, scales = random(out, size), torch.rand(out // 128, size // 128, device="cuda")
        blocks = dense.to(FP8), scales, (128, 128), None, dense.dtype
        for rows in (1, 8, 16, 128, 8192):
            x, shape, operations = random(rows, size), f"[{rows}, {size}] · [{out}, {size}]ᵀ", 2 * rows * size * out
            moved = 2 * rows * (size + out)
            yield nearer(gpu, "linear, bfloat16", shape, moved + 2 * size * out, operations, partial(linear, x, dense))
            read = moved + size * out / 2 + 2 * size * out / 128
            yield nearer(gpu, "weight_only_linear", shape, read, operations, partial(weight_only_linear, x, halves))
            if supported(x.device):
                run = partial(block_scaled_linear, quantize_groups(x, 128), *blocks)
                yield nearer(gpu, "block_scaled_linear", shape, moved + size * out, operations, run)


@benchmark("counted_linear")
def _counted_linear(gpu: Gpu) -> Iterator[Row]:
    """Products of all rows and of two of five, which the device counts, beside torch's product of all: five candidates of 256 rows,
    with gate_up_proj and down_proj of Qwen2.5-1.5B."""
    rows = 1280
    for columns, size in ((17_920, 1536), (1536, 8960)):
        x, weight, shape = random(rows, size), random(columns, size), f"{rows}, {size}] · [{columns}, {size}]ᵀ"
        yield gpu.computed("linear", f"[{shape}", 2 * rows * columns * size, partial(linear, x, weight))
        for count in (rows, 2 * rows // 5):
            there = torch.tensor([count], device="cuda")
            run = partial(counted_linear, x, weight, None, there)
            yield gpu.computed("counted_linear", f"[{count} of {shape}", 2 * count * columns * size, run)


@benchmark("grouped_experts")
def _grouped_experts(gpu: Gpu) -> Iterator[Row]:
    """Decoding steps of Qwen3-30B-A3B, which read the weights of the chosen experts, and steps of scores, which compute."""
    experts, chosen, hidden, inner = 128, 8, 2048, 768
    weight = torch.empty(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16)
    for matrix in weight:
        matrix.normal_()
    for count in (1, 16, 256, 8192):
        x = random(count, hidden)
        # Consecutive experts, so that a step of 16 rows and more reads all of them.
        picked = (torch.arange(count, device="cuda")[:, None] * chosen + torch.arange(chosen, device="cuda")) % experts
        tables = partial(block_pairs, picked, experts)
        yield gpu.moved("block_pairs", f"[{count}, {chosen}] of {experts}", 8 * picked.numel(), tables)
        read, operations = 2 * min(experts, count * chosen) * weight[0].numel(), 2 * count * chosen * weight[0].numel()
        shape = f"[{count}, {hidden}] · {chosen} of [{experts}, {2 * inner}, {hidden}]ᵀ"
        # Both products of a layer share the tables.
        yield nearer(gpu, "grouped_linear", shape, read, operations, partial(grouped_linear, x, weight, picked, tables()))


@benchmark("label_logprobs")
def _label_logprobs(gpu: Gpu) -> Iterator[Row]:
    """Two labels of Qwen3-0.6B: from one row, bound by memory, to many, bound by arithmetic."""
    size = 1024
    head = random(VOCAB, size)
    for count in (1, 16, 64, 128, 1000, 4000):
        hidden, labels = random(count, size) / size**0.5, torch.randint(0, VOCAB, (count, 2), device="cuda")
        shape, run = f"[{count}, {size}] · [{VOCAB}, {size}]ᵀ", partial(label_logprobs, hidden, head, labels)
        yield nearer(gpu, "label_logprobs", shape, 2 * head.numel(), 2 * count * head.numel(), run)


@benchmark("seeded_sampling")
def _seeded_sampling(gpu: Gpu) -> Iterator[Row]:
    """Draws over a large vocabulary, and the thresholds of their filters."""
    for count in (1, 16, 100, 800):
        logits, ones = torch.randn(count, VOCAB, device="cuda") * 3, torch.ones(count, device="cuda")
        shape, read, seeds = f"[{count}, {VOCAB}]", 4.0 * logits.numel(), torch.arange(count, device="cuda")
        yield gpu.moved("seeded_draw", shape, read, partial(seeded_draw, logits, ones, seeds, ones * -9))
        ids = torch.arange(8, device="cuda").expand(count, -1).contiguous()
        few = torch.full((count, 8), 0.125, device="cuda"), ids, seeds
        yield gpu.moved("seeded_choice", f"[{count}, 8]", 12.0 * 8 * count, partial(seeded_choice, *few))
        for top_k, top_p in ((50, 1.0), (0, 0.9), (50, 0.9)):
            none = torch.full_like(ones, float("-inf"))
            run = partial(keep_thresholds, logits, ones, torch.full((count,), top_k, device="cuda"), ones * top_p, none)
            yield gpu.moved("keep_thresholds", f"{shape}, top-k {top_k}, top-p {top_p}", read, run)
            run = partial(eager_thresholds, logits, top_k, top_p)
            yield gpu.moved("the same in plain PyTorch", f"{shape}, top-k {top_k}, top-p {top_p}", read, run)


def eager_thresholds(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The result of keep_thresholds at temperature 1, if all rows have the same filters."""
    largest = logits.topk(top_k).values if top_k else logits.sort(descending=True).values
    below = (largest.softmax(-1).cumsum(-1) < top_p).sum(-1, keepdim=True)
    return (largest.gather(1, below.clamp(max=largest.shape[1] - 1)) - largest[:, :1]).squeeze(1)


@benchmark("candidates")
def _candidates(gpu: Gpu) -> Iterator[Row]:
    """Few and many candidates over a large vocabulary."""
    for count in (1, 16, 100, 800):
        logits, ones = torch.randn(count, VOCAB, device="cuda") * 3, torch.ones(count, device="cuda")
        for width in (8, 64):
            run = partial(candidates, logits, ones, torch.full((count,), width, device="cuda"), ones * 0.95, ones * 0.01, width)
            yield gpu.moved("candidates", f"[{count}, {VOCAB}], {width} kept", 4.0 * logits.numel(), run)


@benchmark("length_tilt")
def _length_tilt(gpu: Gpu) -> Iterator[Row]:
    """All rules. The time is the latency of a launch for any number of rows."""
    width = 8
    for count in (1, 100, 800):
        p = torch.rand(count, width, device="cuda").sort(descending=True).values
        p, z = p / p.sum(-1, keepdim=True), torch.randn(count, width, device="cuda")
        ones = torch.ones(count, device="cuda", dtype=torch.float64)
        rules = torch.arange(count, device="cuda") % len(RULES)
        tilts = Tilts(rules, ones * 1.5, ones * -0.01, ones * 30, ones * 0, ones * 0, ones)
        moved, run = 13.0 * p.numel() + 57.0 * count, partial(length_tilt, p, z, z > 2, ones > 0, tilts)
        yield gpu.moved("length_tilt", f"[{count}, {width}]", moved, run)


@benchmark("largest")
def _largest(gpu: Gpu) -> Iterator[Row]:
    """Log-probabilities of drawn tokens, without and with five alternatives."""
    for count in (1, 256):
        logits, chosen = torch.randn(count, VOCAB, device="cuda") * 3, torch.arange(count, device="cuda")
        for top_n in (0, 5):
            run = partial(token_logprobs, logits, chosen, top_n)
            yield gpu.moved("token_logprobs", f"[{count}, {VOCAB}], top {top_n}", 4.0 * logits.numel(), run)


@benchmark("token_bits")
def _token_bits(gpu: Gpu) -> Iterator[Row]:
    """Rows of logits of which every token is excluded."""
    for count in (1, 16, 64, 256):
        logits = torch.randn(count, VOCAB, device="cuda")
        bits = torch.zeros(count, -(-VOCAB // 32), dtype=torch.int32, device="cuda")
        run = partial(exclude_, logits, torch.arange(count, device="cuda"), bits)
        yield gpu.moved("exclude", f"[{count}, {VOCAB}]", 4.125 * logits.numel(), run)


@benchmark("branch_attention")
def _branch_attention(gpu: Gpu) -> Iterator[Row]:
    """Five candidates per row with the heads of Qwen2.5-1.5B. Each prefix counts once."""
    heads, kv_heads, head_dim, branches = 12, 2, 128, 5
    for count, prefix in ((1, 4096), (16, 2048), (100, 1024), (800, 1024)):
        q, (k, v) = random(count * branches, heads, head_dim), random(2, count * branches, kv_heads, head_dim)
        keys, values = random(2, count * prefix, kv_heads, head_dim)
        kv_indptr = torch.arange(count + 1, device="cuda") * prefix
        kv_indices = torch.randperm(count * prefix, device="cuda")  # scattered, as in a server after some time
        counts = torch.full((count,), branches, device="cuda")
        run = partial(branch_attention, q, k, v, keys, values, kv_indptr, kv_indices, counts)
        moved = 2 * keys.nbytes + 2 * q.nbytes + 2 * k.nbytes
        yield gpu.moved("branch_attention", f"{count} rows, {branches} branches after {prefix}", moved, run)


@benchmark("paged_attention")
def _paged_attention(gpu: Gpu) -> Iterator[Row]:
    """The heads of Qwen3-0.6B: items of 180 tokens on queries of 120, prompts, a chunk of one, and decoding with many, long and few
    contexts. Only pairs that the causal mask allows count."""
    heads, kv_heads, head_dim = 16, 8, 128
    cutting = {"group": heads // kv_heads, "kv_heads": kv_heads, "rows": block_rows(head_dim, torch.bfloat16)}
    item = [(120, 120), *10 * [(180, 300)]]
    cases: list[tuple[str, list[tuple[int, int]], int | None]] = [
        ("5 · (120, 10 · 180)", 5 * item, None),
        ("4 prompts of 2048", 4 * [(2048, 2048)], None),
        ("512 after 20000", [(512, 20_512)], None),
        *((f"{count} tokens after {context}", count * [(1, context)], None) for count, context in ((256, 300), (64, 4096))),
        ("1 tokens after 20000", [(1, 20_000)], None),
        ("120, 10 · 180; padded to 2048", item, 2048),
        ("100 tokens after 300, padded to 128", 100 * [(1, 300)], 128),
    ]
    scattered = np.random.default_rng(0).permutation(SLOTS)  # as in a server after some time
    for shape, lengths, padded in cases:
        ends = np.cumsum([context for _, context in lengths])
        contexts = [scattered[end - context : end] for end, (_, context) in zip(ends, lengths, strict=True)]
        cut = lay_out([queries for queries, _ in lengths], contexts, **cutting)
        if padded is not None:  # fixed tables for this number of queries
            room = Room.of(padded, **cutting)
            packed = room.pack(cut, SLOTS - 1)
            assert packed is not None
            cut = room.within(packed)
        q = random(len(cut.out_cache_loc), heads, head_dim)
        keys, values = torch.randn(2, SLOTS, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
        run = partial(paged_attention, q, keys, values, cut.to(torch.device("cuda")))
        if lengths[0][0] == 1:
            moved = 2 * sum(context for _, context in lengths) * kv_heads * head_dim * 2
            yield gpu.moved("paged_attention", shape, moved, run)
        else:
            pairs = sum(queries * context - queries * (queries - 1) // 2 for queries, context in lengths)
            yield gpu.computed("paged_attention", shape, 4 * pairs * heads * head_dim, run)
