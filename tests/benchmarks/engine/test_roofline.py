"""FLOPs beside those of PyTorch's own counter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.roofline import flops
from benchmarks.engine.subject import SMALL, random_decoder

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
