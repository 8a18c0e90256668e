"""FLOPs beside those of PyTorch's own counter, and bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.roofline import flops, layer_flops, weight_bytes
from benchmarks.engine.subject import QWEN3_06B, QWEN3_30B_A3B, SMALL, random_decoder

TINY = replace(SMALL, vocab_size=50, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def test_pytorch_counts_the_same():
    decoder, length = random_decoder(TINY).bfloat16(), 7  # the counter does not know what computes float32 on a CPU

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows.transpose(0, 1) for rows in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).transpose(0, 1)

    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        hidden = decoder(torch.arange(length), torch.arange(length), attend)
        decoder.logits(hidden[-1:])
    assert flops(TINY, length, pairs=length * length, rows=1) == counter.get_total_flops()


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """One token reads those that it multiplies with; many read all, 30.2 billion weights without the embedding."""
    embedding = QWEN3_30B_A3B.vocab_size * QWEN3_30B_A3B.hidden_size
    one, many = (weight_bytes(QWEN3_30B_A3B, 1, tokens) for tokens in (1, 256))
    assert one == layer_flops(QWEN3_30B_A3B, 1) // 2 + embedding
    assert round(many / 1e9, 1) == 30.2
    assert weight_bytes(QWEN3_06B, 2, 1) == weight_bytes(QWEN3_06B, 2, 256)
