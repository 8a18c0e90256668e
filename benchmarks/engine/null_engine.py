"""An engine whose models and kernels cost nothing, so that what is left is the work of the host.

Loop, scheduler, slots, prefix cache, attention layouts, copies, readouts and grammars are the real ones, set up as on a GPU: steps
overlap, small steps fill the tables of CUDA graphs, and the length model computes all candidates. Forward passes return zeros of
the right shape, and logits have few columns, so that operations on the device cost little more than their dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.engine.subject import QWEN3_06B
from engine import wire
from engine.attention.branches import FixedBranches
from engine.attention.triton import FixedTritonAttention, TritonAttention
from engine.device.cuda_graphs import Captured
from engine.kvcache.kv import KVCache
from engine.kvcache.slots import SlotPool
from engine.lenvm.graphs import ROWS, WIDTH, PassGraphs
from engine.lenvm.guided_draws import LenVMRunner
from engine.loop import Loop
from engine.models.config import ModelConfig
from engine.models.decoder import Attend, Decoder
from engine.models.lenvm import LenVM
from engine.runner.graphs import BUCKETS, StepGraphs
from engine.runner.runner import Runner
from engine.scheduling.scheduler import Budget, Scheduler
from engine.structured.vocabulary import load_vocabulary
from engine.structured_requests import StructuredRequests
from kernels import token_bits
from kernels.paged_attention import block_rows

VOCABULARY = 151_936
MAX_BATCHED_TOKENS = 8192
SLOTS = 262_144
HIDDEN = 8
EOS = VOCABULARY - 1


class NullDecoder(Decoder):
    """Returns zeros: [tokens, hidden], and [rows, columns] for logits."""

    def __init__(self, config: ModelConfig, columns: int) -> None:
        super().__init__(replace(config, vocab_size=columns))
        self._hidden = torch.zeros(MAX_BATCHED_TOKENS * 2, HIDDEN)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # noqa: ARG002
        return self._hidden[: len(tokens)]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self.config.vocab_size)  # draws change logits in place


class NullLenVM(LenVM):
    """Returns zeros: [tokens, hidden], from which the small value head computes a constant."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # noqa: ARG002
        return torch.zeros(1, HIDDEN).expand(len(tokens), -1)


class NullCapture:
    """Captures work without its replay, which costs the host one launch."""

    allocated = 0

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        return Captured(work(), lambda: None)


class Layouts(TritonAttention):
    """Plans steps for the heads of a real model, over a small KV cache."""

    def __init__(self, kv: KVCache) -> None:
        super().__init__(kv, 1)
        _as_real_model(self)


class FixedLayouts(FixedTritonAttention):
    """Fills tables of fixed size for the heads of a real model, over a small KV cache."""

    def __init__(self, kv: KVCache, most_tokens: int) -> None:
        super().__init__(kv, 2, most_tokens)
        _as_real_model(self)


def _as_real_model(attention: TritonAttention) -> None:
    """Cut work as for Qwen3-0.6B in bfloat16."""
    attention._kv_heads = QWEN3_06B.num_kv_heads
    attention._group = QWEN3_06B.num_heads // QWEN3_06B.num_kv_heads
    attention._rows = block_rows(QWEN3_06B.head_dim, torch.bfloat16)


def null_loop(columns: int, *, guided: bool = False, tokenizer_json: bytes | None = None) -> Loop:
    """``columns``: of the logits. ``guided``: with a length model. ``tokenizer_json``: with grammars over this vocabulary."""
    config = replace(
        QWEN3_06B,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HIDDEN,
        eos_token_ids=(EOS,),
    )
    decoder = NullDecoder(config, columns)
    kv, lenvm_kv = (KVCache(layers=1, slots=SLOTS, kv_heads=1, head_dim=HIDDEN, dtype=torch.float32) for _ in range(2))
    graphs = StepGraphs(decoder, FixedLayouts(kv, max(BUCKETS)), NullCapture(), BUCKETS)
    lenvm = None
    if guided:
        model = NullLenVM(replace(config, vocab_size=columns))
        passes = PassGraphs(model, FixedBranches(lenvm_kv, 1, max(ROWS), WIDTH), NullCapture(), ROWS)
        lenvm = LenVMRunner(model, Layouts(lenvm_kv), 0.99, (EOS,), passes, compact=False)
    runner = Runner(decoder, Layouts(kv), (EOS,), graphs, lenvm)
    budget = Budget(MAX_BATCHED_TOKENS, 512)
    scheduler = Scheduler(SlotPool(SLOTS), budget, run_ahead=True, lenvm_pool=SlotPool(SLOTS) if guided else None)
    structured = None
    if tokenizer_json is not None:
        structured = StructuredRequests(load_vocabulary(tokenizer_json, VOCABULARY, (EOS,)))
        token_bits.exclude_reference_ = _exclude_columns  # the product's kernel for GPUs excludes all in one launch
    return Loop(runner, scheduler, _info(structured is not None, guided), max_waiting=1024, overlap=True, structured=structured)


def _exclude_columns(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """:func:`kernels.token_bits.exclude_reference_` for all rows at once."""
    ids = torch.arange(logits.shape[1])
    allowed = bits[:, ids >> 5] >> (ids & 31) & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))


def _info(grammar: bool, guided: bool) -> wire.Info:
    able: Sequence[str] = ["score", "generate", *(["grammar"] if grammar else []), *(["length_guidance"] if guided else [])]
    limits = wire.Limits(10_000, SLOTS, 20, 1000, 128)
    return wire.Info("null", "null", VOCABULARY, 40_960, [EOS], list(able), limits, 0.99 if guided else None)
