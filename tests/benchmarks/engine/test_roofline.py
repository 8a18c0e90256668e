"""FLOPs by hand, by PyTorch's own counter, and as published for Qwen3-0.6B."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.roofline import flops, layer_weights, weight_bytes
from benchmarks.engine.subject import SMALL, random_decoder

TINY = replace(SMALL, vocab_size=50, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def test_by_hand():
    # q and o 16 × 32 each, k and v 16 × 16 each, gate, up and down 16 × 24 each
    assert layer_weights(TINY) == 2 * 512 + 2 * 256 + 3 * 384
    assert flops(TINY, tokens=8, pairs=27, rows=2) == 2 * (2 * 8 * 2688 + 4 * 27 * 32) + 2 * 2 * 16 * 50
    assert weight_bytes(TINY, 4) == 4 * (2 * 2688 + 16 * 50)


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
