"""An engine whose models and kernels cost nothing, so that what is left is the work of the host.

Loop, scheduler, slots, prefix cache, attention layouts, copies, readouts and grammars are the real ones, set up as on a GPU: steps
overlap, small steps fill the tables of CUDA graphs, and the length model computes all candidates. Forward passes and the project's
kernels return constants of the right shape. Other operations on tensors run, on logits of few columns, so that they cost little
more than their dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.subject import QWEN3_06B
from engine import build, wire
from engine.attention.triton import TritonAttention
from engine.device import sampling
from engine.device.cuda_graphs import Captured
from engine.kvcache.kv import KVCache
from engine.kvcache.slots import SlotPool
from engine.lenvm.guided_draws import LenVMRunner
from engine.loop import Loop
from engine.models.config import ModelConfig
from engine.models.decoder import Attend, Decoder
from engine.models.lenvm import LenVM
from engine.models.modules import TokenHead
from engine.runner.runner import Runner
from engine.scheduling.scheduler import Budget, Scheduler
from engine.scheduling.structured_requests import StructuredRequests
from engine.structured.vocabulary import load_vocabulary
from kernels import candidates, label_logprobs, length_tilt, seeded_sampling, token_bits

VOCABULARY = 151_936
MAX_BATCHED_TOKENS = 8192
SLOTS = 262_144
HIDDEN, HEAD_DIM = 8, 2
EOS = VOCABULARY - 1


class NullHead(TokenHead):
    """Returns zeros."""

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), len(self.weight))  # draws change logits in place


class NullDecoder(Decoder):
    """Returns zeros: [tokens, hidden], and [rows, columns] for logits."""

    def __init__(self, config: ModelConfig, columns: int) -> None:
        super().__init__(replace(config, vocab_size=columns))
        self._hidden = torch.zeros(MAX_BATCHED_TOKENS * 2, HIDDEN)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self._hidden[: len(tokens if rows is None else rows)]

    @property
    def token_head(self) -> TokenHead:
        return NullHead(*super().token_head)


class NullLenVM(LenVM):
    """Returns zeros: [tokens, hidden], from which the small value head computes a constant."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.zeros(1, HIDDEN).expand(len(tokens if rows is None else rows), -1)


class NullCapture:
    """Captures work without its replay, which costs the host one launch."""

    allocated = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        return Captured(work(), lambda: None)


def null_loop(columns: int, *, guided: bool = False, tokenizer_json: bytes | None = None) -> Loop:
    """``columns``: of the logits. ``guided``: with a length model. ``tokenizer_json``: with grammars over this vocabulary."""
    config = replace(QWEN3_06B, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_layers=1, head_dim=HEAD_DIM, eos_token_ids=(EOS,))
    decoder, budget = NullDecoder(config, columns), Budget(MAX_BATCHED_TOKENS, 512)
    build.CudaCapture = NullCapture  # type: ignore[assignment,attr-defined]
    candidates.candidates_reference = _candidates  # type: ignore[assignment]
    length_tilt.length_tilt_reference = _tilt  # type: ignore[assignment]
    label_logprobs.label_logprobs_reference = _label_logprobs  # type: ignore[assignment]
    seeded_sampling.seeded_choice_reference = _choice  # type: ignore[assignment]
    attention = _attention(config)
    lenvm = None
    if guided:
        model, lenvm_attention = NullLenVM(replace(config, vocab_size=columns)), _attention(config)
        passes = build._capture_passes(model, lenvm_attention.kv, budget)
        lenvm = LenVMRunner(model, lenvm_attention, 0.99, (EOS,), passes, compact=False)
    graphs = [build._capture(decoder, attention.kv, budget, None)]
    runner = Runner(decoder, attention, (EOS,), graphs, lenvm)
    scheduler = Scheduler(SlotPool(SLOTS), budget, run_ahead=True, lenvm_pool=SlotPool(SLOTS) if guided else None)
    structured = None
    if tokenizer_json is not None:
        structured = StructuredRequests(load_vocabulary(tokenizer_json, VOCABULARY, (EOS,)))
        sampling.FEW = 1 << 40  # what a CPU does apart
        token_bits.exclude_reference_ = _exclude_columns  # the kernel for GPUs excludes all in one launch
    else:
        seeded_sampling.seeded_draw_reference = _draw  # type: ignore[assignment]  # draws that follow a grammar are real
    return Loop(runner, scheduler, _info(structured is not None, guided), max_waiting=1024, overlap=True, structured=structured)


def _attention(config: ModelConfig) -> TritonAttention:
    """Attention with as many heads as the real model, over a KV cache of small heads."""
    kv = KVCache(layers=1, slots=SLOTS, kv_heads=config.num_kv_heads, head_dim=HEAD_DIM, dtype=torch.float32)
    return TritonAttention(kv, config.num_heads)


def _candidates(logits: Tensor, _: Tensor, top_k: Tensor, *others: Any) -> candidates.Candidates:
    rows, width = len(logits), others[-1]
    ids = torch.arange(width).expand(rows, -1).contiguous()
    p = (ids < top_k.unsqueeze(1)) / top_k.unsqueeze(1)
    return candidates.Candidates(ids, p, top_k.clone())


def _tilt(p: Tensor, *_: Any) -> Tensor:
    return p


def _label_logprobs(hidden: Tensor, head: Tensor, labels: Tensor, cap: float) -> Tensor:  # noqa: ARG001
    return torch.zeros(labels.shape)


def _draw(logits: Tensor, *_: Any) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int64)


def _choice(p: Tensor, *_: Any) -> Tensor:
    return torch.zeros(len(p), 1, dtype=torch.int64)


def _exclude_columns(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """:func:`kernels.token_bits.exclude_reference_` for all rows at once."""
    ids = torch.arange(logits.shape[1])
    allowed = bits[:, ids >> 5] >> (ids & 31) & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))


def _info(grammar: bool, guided: bool) -> wire.Info:
    able: Sequence[str] = ["score", "generate", *(["grammar"] if grammar else []), *(["length_guidance"] if guided else [])]
    limits = wire.Limits(10_000, SLOTS, 20, 1000, 128)
    return wire.Info("null", "null", VOCABULARY, 40_960, [EOS], list(able), limits, 0.99 if guided else None)
