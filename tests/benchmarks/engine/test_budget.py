"""The counts of the GPU budget, by hand and against the other counts; the page is up to date."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.engine import budget, budget_guided, budget_lora
from benchmarks.engine.roofline import Work, elementwise_bytes, flops, layer_flops
from benchmarks.engine.subject import QWEN3_06B
from engine.lenvm.parts import WIDTHS


def kernels(**options) -> dict[str, budget.Kernel]:
    return {kernel.name: kernel for kernel in budget.step(QWEN3_06B, **options)}


def test_the_page_is_up_to_date() -> None:
    """After a change: ``python -m benchmarks budget``."""
    text = budget.PAGE.read_text(encoding="utf-8")
    assert sorted(budget.names(text)) == sorted(budget.TABLES)
    assert budget.page(text) == text


def work() -> Work:
    queries, contexts = budget.segments()
    pairs = sum(count * (length - count) + count * (count + 1) // 2 for count, length in zip(queries, contexts, strict=True))
    return Work(sum(queries), pairs, sum(count == budget.ITEM for count in queries), sum(contexts))


@pytest.mark.parametrize("fp8", [False, True])
def test_sums_are_those_of_the_roofline(fp8: bool) -> None:
    found, needed = kernels(fp8=fp8, last_rows=False), work()
    assert needed.tokens == 4 * 1920 + 120 + 2 * 180
    products = [found[name] for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")]
    assert sum(product.flops for product in products) == layer_flops(QWEN3_06B, needed)
    exact, computed = budget.attention_work(QWEN3_06B, *budget.segments())
    assert exact * QWEN3_06B.num_layers + sum(each.flops for each in products) + found["label_logprobs"].flops == flops(
        QWEN3_06B, needed
    )
    assert 1.2 < computed / exact < 1.4
    between = sum(found[name].bytes for name in found if name.startswith(("rms_norm", "add_rms", "qk_norm", "silu", "quantize")))
    between += found["attention"].bytes
    angles = QWEN3_06B.num_layers * needed.tokens * 4 * QWEN3_06B.head_dim  # the roofline leaves them out
    assert between - angles == pytest.approx(elementwise_bytes(QWEN3_06B, needed, 2, quantized=fp8), rel=0.001)


def test_the_last_layer() -> None:
    """42 rows of 8,160 behind attention of one layer of 28."""
    some, every = kernels(fp8=False), kernels(fp8=False, last_rows=False)
    for name in ("o_proj", "gate_up_proj", "down_proj"):
        assert some[name].flops / every[name].flops == pytest.approx((27 + 42 / 8160) / 28)
    assert some["qkv_proj"] == every["qkv_proj"]
    saved = 1 - sum(each.seconds for each in some.values()) / sum(each.seconds for each in every.values())
    assert 0.02 < saved < 0.03


def test_attention_by_hand() -> None:
    """An item of 180 on a query of 120, two query heads a key head: 64, 64 and 52 queries, which see 184, 248 and 300 keys."""
    one = replace(QWEN3_06B, num_heads=2, num_kv_heads=1)
    needed, computed = budget.attention_work(one, [180], [300])
    assert needed == 4 * 2 * 128 * (180 * 120 + 180 * 181 // 2)
    assert computed == 4 * 128 * 128 * (192 + 256 + 320)


def test_catalogue_by_hand() -> None:
    """409 queries of 20 on 180 cached tokens: 40 rows a key head in one block, which sees 200 keys in four blocks."""
    queries, contexts = budget.catalogue()
    assert (sum(queries), len(queries), set(contexts)) == (8180, 409, {200})
    needed, computed = budget.attention_work(QWEN3_06B, queries, contexts)
    assert needed == 409 * 4 * 16 * 128 * (20 * 180 + 20 * 21 // 2)
    assert computed == 409 * 8 * 4 * 128 * 128 * 256
    assert budget.attention_work(QWEN3_06B, queries, contexts, 64)[1] == computed // 2
    plain, small = (
        {kernel.name: kernel for kernel in budget.step(QWEN3_06B, fp8=False, work=(queries, contexts), kept=kept)}
        for kept in (2, 1)
    )
    saved = plain["attention"].bytes - small["attention"].bytes
    assert saved == 28 * 2 * 409 * 200 * 1024
    assert plain["qkv_proj"] == small["qkv_proj"]


def test_candidates() -> None:
    assert budget_guided.computed_candidates(100) == (104 * 8, 104 * 5)
    assert budget_guided.computed_candidates(800) == (800 * 8, 800 * 5)  # launched, so not padded
    assert WIDTHS == (5, 8)


def test_needed_candidates_of_many_rows_are_computed_alone() -> None:
    """Predicted for rows that need two of five candidates: at most 1.8 times a plain step, where all five take 1.93 times."""
    lines = [line.strip("| ").split(" | ") for line in budget_guided.survivors_table().splitlines()[2:]]
    ratios = {rows: float(cells[-1]) for rows, *cells in lines}
    assert ratios.keys() == {"50", "100", "256", "800"}
    assert max(ratios.values()) <= 1.8


def test_additions_of_adapters_by_hand() -> None:
    """8,256 rows of 28 layers, 43 of them in the last one behind attention; 16 adapters of rank 16."""
    every, behind, matrices = 28 * 8256, 27 * 8256 + 43, 28 * 16 * 16
    apart, made = ({kernel.name: kernel for kernel in budget_lora.additions(QWEN3_06B, fused=fused)} for fused in (False, True))
    assert apart["shrink of qkv_proj"] == made["shrink of qkv_proj"]
    assert made["shrink of qkv_proj"].bytes == 2 * (every * (1024 + 48) + matrices * 3 * 1024)
    assert made["shrink of down_proj"].flops == 2 * behind * 3072 * 64
    assert apart["expand of gate_up_proj"].bytes == 2 * (behind * (32 + 2 * 6144) + matrices * 6144)
    within = made["expand of gate_up_proj in silu_mul"]
    assert apart["expand of gate_up_proj"].bytes - within.bytes == 4 * behind * 6144
    assert within.flops == apart["expand of gate_up_proj"].flops == 2 * behind * 6144 * 16
    launches = [sum(kernel.launches for kernel in found.values()) for found in (apart, made)]
    assert launches == [8 * 28, 6 * 28]


def test_operations_that_bytes_hide_take_no_time() -> None:
    """Additions within the gate take as much longer as the operations take longer than the gate's bytes."""
    for rank in (16, 128, 1024):
        kernel = budget_lora.additions(QWEN3_06B, rank)[5]
        assert kernel.name == "expand of gate_up_proj in silu_mul"
        (gate,) = (each for each in budget.step(QWEN3_06B, fp8=False) if each.name == "silu_mul")
        rows = (27 * 8256 + 43) / (27 * 8160 + 42)
        whole = max(kernel.flops / kernel.rate, gate.seconds * rows + kernel.bytes / (budget_lora.COPIES * budget_lora.BANDWIDTH))
        assert kernel.seconds == pytest.approx(whole - gate.seconds * rows)


def test_additions_of_usual_ranks_meet_the_goal() -> None:
    lines = [line.strip("| ").split(" | ") for line in budget.TABLES["shares of adapters"]().splitlines()[2:]]
    shares = {name: int(made.removesuffix(" %")) for name, _, _, _, _, made, _ in lines}
    assert max(share for name, share in shares.items() if not name.endswith(("128", "0.6B in FP8, 16"))) <= 15


def test_adapters_of_a_base_in_fp8_read_codes() -> None:
    plain, codes = ({kernel.name: kernel.bytes for kernel in budget_lora.additions(QWEN3_06B, fp8=fp8)} for fp8 in (False, True))
    behind = 27 * 8256 + 43
    assert plain["shrink of down_proj"] - codes["shrink of down_proj"] == behind * 3072
    assert plain["shrink of o_proj"] == codes["shrink of o_proj"]
    assert "expand of gate_up_proj" in codes.keys() - plain.keys()
