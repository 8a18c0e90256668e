"""FLOPs by hand, by PyTorch's own counter, and as published for Qwen3-0.6B."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.roofline import (
    Peaks,
    Work,
    elementwise_bytes,
    flops,
    layer_flops,
    layer_weights,
    measure_peaks,
    roofline,
    weight_bytes,
)
from benchmarks.engine.subject import QWEN3_06B, SMALL, random_decoder
from benchmarks.engine.workload import Workload

TINY = replace(SMALL, vocab_size=50, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def test_by_hand():
    # q and o 16 × 32 each, k and v 16 × 16 each, gate, up and down 16 × 24 each
    assert layer_weights(TINY) == 2 * 512 + 2 * 256 + 3 * 384
    # query 2, two items of 3: 8 tokens; pairs 1 + 2, and 3 + 4 + 5 for each item; contexts 2 + 5 + 5
    work = Work.shared(Workload(query=2, item=3, items=2))
    assert work == Work(tokens=8, pairs=27, rows=2, context=12)
    assert flops(TINY, work) == 2 * (2 * 8 * 2688 + 4 * 27 * 32) + 2 * 2 * 16 * 50
    assert Work.alone(Workload(query=2, item=3, items=2)) == Work(tokens=10, pairs=30, rows=2, context=10)
    assert weight_bytes(TINY, 4) == 4 * (2 * 2688 + 16 * 50)
    # a token: q, k, v read and written 2 × 64, q and output 64, residuals 8 × 16, gate, up and product 3 × 24; a key and value 32
    assert elementwise_bytes(TINY, work, 2) == 2 * 2 * (8 * (128 + 64 + 128 + 72) + 12 * 32)
    # in FP8, of these the two normed rows of 16, the product of 24 and a second writing of the output of 32 take a byte each
    token = 2 * (128 + 64 + 6 * 16 + 2 * 24 + 32) + 2 * 16 + 24 + 32
    assert elementwise_bytes(TINY, work, 2, quantized=True) == 2 * (8 * token + 2 * 12 * 32)
    assert weight_bytes(TINY, 2, quantized=True) == 2 * 2688 + 2 * 16 * 50


def test_pytorch_counts_the_same():
    decoder, length = random_decoder(TINY).bfloat16(), 7  # the counter does not know what computes float32 on a CPU

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows.transpose(0, 1) for rows in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).transpose(0, 1)

    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        hidden = decoder(torch.arange(length), torch.arange(length), attend)
        decoder.logits(hidden[-1:])
    everyone_sees_all = Work(tokens=length, pairs=length * length, rows=1, context=length)
    assert flops(TINY, everyone_sees_all) == counter.get_total_flops()


def test_the_standard_workload_of_qwen3():
    """The limits that the targets give for an H200 that reaches 790 TFLOP/s."""
    workload = Workload()
    assert flops(QWEN3_06B, Work.alone(workload)) / 10 == pytest.approx(274.9e9, rel=1e-3)
    assert flops(QWEN3_06B, Work.shared(workload)) / 10 == pytest.approx(178.3e9, rel=1e-3)
    limits = roofline(QWEN3_06B, "bfloat16", workload, Peaks(790e12, 4.3e12), request_seconds=10 / 2000)
    assert limits["limit_items_per_s"] == pytest.approx(4431, rel=1e-3)
    assert limits["percent_of_peak_flops"] == pytest.approx(100 * 2000 / 4431, rel=1e-3)
    assert 3200 < limits["limit_items_per_s_with_elementwise"] < 3500


def test_layers_in_fp8_have_a_peak_of_their_own():
    """With twice the peak for them, and attention and head as they were, the products take little more than half as long."""
    workload, work = Workload(), Work.shared(Workload())
    share = layer_flops(QWEN3_06B, work) / flops(QWEN3_06B, work)
    assert 0.9 < share < 1
    limits = roofline(QWEN3_06B, "bfloat16", workload, Peaks(790e12, 4.3e12, 1580e12), request_seconds=10 / 2000)
    assert limits["limit_items_per_s"] == pytest.approx(4431 / (1 - share / 2), rel=1e-3)
    assert limits["peak_gflops_of_layers"] == 1580e3
    plain = roofline(QWEN3_06B, "bfloat16", workload, Peaks(790e12, 4.3e12), request_seconds=10 / 2000)
    assert limits["mb_of_weights"] < 0.7 * plain["mb_of_weights"]
    # Codes save a little less than attention's output costs, which is quantised by itself.
    traffic = "mb_a_request_between_products"
    assert limits[traffic] / plain[traffic] == pytest.approx(1.016, abs=1e-3)


def test_peaks_are_of_this_machine(monkeypatch):
    monkeypatch.setattr("benchmarks.engine.roofline.MATRIX", {"cpu": 256})
    monkeypatch.setattr("benchmarks.engine.roofline.COPIED_BYTES", {"cpu": 1 << 22})
    peaks = measure_peaks(torch.device("cpu"), torch.float32)
    assert 1e8 < peaks.flops < 1e14
    assert 1e7 < peaks.bandwidth < 1e13
    assert peaks.quantized_flops is None
    quantised = measure_peaks(torch.device("cpu"), torch.float32, "fp8")
    assert quantised.quantized_flops is not None
    assert 1e7 < quantised.quantized_flops < 1e14
    assert quantised.or_better(Peaks(0, 0, 1e15)).quantized_flops == 1e15
