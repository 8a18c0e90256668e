"""FlashInfer's wrappers, plans and modules for windows, soft caps and scales. Nothing here runs or compiles its kernels: what the
backend asks of FlashInfer is recorded, and a stand-in computes it where an engine runs."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.test_graphs import a_segment
from tests.engine.test_late_gpu import alike, never, replies_at, run, traffic
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Heads
from yardstick_llm.engine.models.rope import Rope
from yardstick_llm.engine.runner.attention import flashinfer
from yardstick_llm.engine.runner.attention.base import KVCache
from yardstick_llm.engine.runner.attention.flashinfer import FlashInferAttention
from yardstick_llm.engine.runner.attention.select import choose
from yardstick_llm.engine.runner.attention.triton import TritonAttention
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec

GPU, HALF, HEADS, KV_HEADS, HEAD_DIM = torch.device("cuda", 0), torch.bfloat16, 4, 2, 64
WINDOW, CAPPED, SCALED = AttentionSpec(window=8), AttentionSpec(0.25, None, 30.0), AttentionSpec(scale=0.5)
BOTH = AttentionSpec(0.25, 5, 30.0)
SETTLED = ("sm_scale", "window_left", "logits_soft_cap")


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` of FlashInfer 0.6.6, which notes how it is planned and run."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str) -> None:
        self.workspace = workspace
        self._float_workspace_buffer = self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = workspace
        self._cached_module = SimpleNamespace(plan=self._plan)
        self.settled: dict[str, Any] = {}
        self.windows: list[int] = []
        self.runs = 0

    def plan(self, *arguments: Any, **named: Any) -> None:
        self.settled = named

    def _plan(self, *arguments: Any) -> str:
        """Arguments as ``plan`` of the module has them: 16 of any backend, and three of "fa2"."""
        assert len(arguments) == 19
        _, _, _, qo, kv, lengths, rows, batch, heads, kv_heads, page, graph, head_dim, _, causal, window_left, *rest = arguments
        assert (heads, kv_heads, page, graph, head_dim, causal) == (HEADS, KV_HEADS, 1, False, HEAD_DIM, True)
        assert (qo.tolist(), kv.tolist(), lengths.tolist(), rows, batch) == ([0, 3, 4], [0, 9, 13], [9, 4], 4, 2)
        assert rest == [-1, False, 0]
        self.windows.append(window_left)
        return f"plan {window_left}"

    def run(self, q: torch.Tensor, pages: Any, *, out: torch.Tensor) -> torch.Tensor:
        assert self._plan_info == f"plan {self.settled['window_left']}"  # type: ignore[attr-defined]
        self.runs += 1
        return out.zero_()


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[Wrapper]:
    made: list[Wrapper] = []

    def make(*given: Any, **named: Any) -> Wrapper:
        made.append(Wrapper(*given, **named))
        return made[-1]

    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=make))
    return made


@pytest.mark.parametrize(
    ("specs", "settled"),
    [
        ([], [(HEAD_DIM**-0.5, -1, 0.0)]),
        ([PLAIN] * 4, [(HEAD_DIM**-0.5, -1, 0.0)]),
        ([WINDOW] * 4, [(HEAD_DIM**-0.5, 7, 0.0)]),
        ([CAPPED] * 4, [(0.25, -1, 30.0)]),
        ([SCALED] * 4, [(0.5, -1, 0.0)]),
        ([BOTH, CAPPED, BOTH, CAPPED], [(0.25, 4, 30.0), (0.25, -1, 30.0)]),
        ([WINDOW, WINDOW, WINDOW, PLAIN], [(HEAD_DIM**-0.5, 7, 0.0), (HEAD_DIM**-0.5, -1, 0.0)]),
    ],
    ids=["none given", "plain", "window", "capped", "scaled", "gemma 2", "gemma 3"],
)
def test_a_step_has_a_plan_for_each_distinct_spec(
    wrappers: list[Wrapper], specs: list[AttentionSpec], settled: list[tuple[float, int, float]]
) -> None:
    """Each layer runs the wrapper of its spec, and steps alternate between two sets of wrappers."""
    kv = KVCache(layers=4, slots=20, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    attention = FlashInferAttention(kv, HEADS, specs)
    assert [tuple(wrapper.settled[name] for name in SETTLED) for wrapper in wrappers] == settled * 2
    assert {id(wrapper.workspace) for wrapper in wrappers} == {id(wrappers[0].workspace)}
    segments = [a_segment(np.arange(9, dtype=np.int32), 3), a_segment(np.arange(9, 13, dtype=np.int32), 1)]
    heads = Heads(torch.zeros(4, HEADS + 2 * KV_HEADS, HEAD_DIM), KV_HEADS, None, None, 0.0, *torch.zeros(2, 4, HEAD_DIM // 2))
    for _ in range(3):
        attend = attention.plan(segments)
        for layer in range(4):
            attend.attend(layer, heads)
    count = len(settled)
    assert [wrapper.windows for wrapper in wrappers[:count]] == [[window] * 2 for _, window, _ in settled]
    assert [wrapper.windows for wrapper in wrappers[count:]] == [[window] for _, window, _ in settled]
    layers = {spec: attention.specs.count(spec) for spec in attention.specs}
    assert [wrapper.runs for wrapper in wrappers[:count]] == [2 * number for number in layers.values()]


def most_planned(heads: int, kv_heads: int, head_dim: int, processors: int) -> int:
    """Bytes of the workspace that ``PrefillPlan`` of FlashInfer 0.6.6 takes for one prompt of a long context, at most."""
    group, tiles = heads // kv_heads, 128 if head_dim < 256 else 64
    most = 2 * processors // kv_heads
    found = []
    for queries in range(-(-65 // group), 600, 7):
        of_queries = -(-queries * group // tiles)
        batches = (of_queries * -(-20_000 // chunk) for chunk in range(128, 20_000, 16))
        found += [batch for batch in batches if batch <= most][:1]
    return heads * max(found) * tiles * (head_dim + 1) * 4


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 1, 128), (16, 1, 128), (8, 4, 256)], ids=str)
def test_the_workspace_has_room_for_every_plan(heads: int, kv_heads: int, head_dim: int) -> None:
    """Also for a quarter of Qwen3-235B-A22B, with 16 query heads for its key head."""
    room = flashinfer.workspace_bytes(heads, kv_heads, head_dim, 132)
    assert most_planned(heads, kv_heads, head_dim, 132) <= room
    assert (room > flashinfer.WORKSPACE_BYTES) == (heads // kv_heads == 16)


def gen_batch_prefill_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_fp16_qk_reduction: bool,
) -> SimpleNamespace:
    """FlashInfer 0.6.6's signature and names. One module is prebuilt, and another was compiled."""
    short = {torch.bfloat16: "bf16", torch.float16: "f16", torch.int32: "i32"}
    name = (
        f"batch_prefill_with_kv_cache_dtype_q_{short[dtype_q]}_dtype_kv_{short[dtype_kv]}_dtype_o_{short[dtype_o]}"
        f"_dtype_idx_{short[dtype_idx]}_head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}_posenc_{pos_encoding_mode}"
        f"_use_swa_{use_sliding_window}_use_logits_cap_{use_logits_soft_cap}_f16qk_{use_fp16_qk_reduction}"
    )
    prebuilt, window = (name.endswith(f"use_swa_{swa}_use_logits_cap_False_f16qk_False") for swa in (False, True))
    prebuilt, window = "head_dim_qk_128" in name and prebuilt, "head_dim_qk_128" in name and window
    return SimpleNamespace(name=name, is_aot=prebuilt, is_compiled=prebuilt or window)


def config(head_dim: int = 128, **fields: Any) -> ModelConfig:
    made = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_layers=2,
        num_heads=16,
        num_kv_heads=8,
        head_dim=head_dim,
        max_context=100,
        rope=Rope(10000.0),
    )
    return replace(made, **fields)


@pytest.mark.parametrize(
    ("fields", "backend", "origin"),
    [
        ({}, FlashInferAttention, "prebuilt"),
        ({"attention_scale": 0.3}, FlashInferAttention, "prebuilt"),
        ({"windows": [8, None]}, FlashInferAttention, "compiled"),
        ({"windows": [8, 8]}, FlashInferAttention, "compiled"),
        ({"attention_cap": 50.0}, TritonAttention, "compiled"),
        ({"attention_cap": 50.0, "windows": [8, None]}, TritonAttention, "compiled"),
        ({"head_dim": 256}, TritonAttention, "compiled"),
    ],
    ids=["plain", "scale", "some windows", "windows", "cap", "gemma 2", "another head size"],
)
def test_flashinfer_serves_what_it_has_modules_for(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], backend: type, origin: str
) -> None:
    """All modules of a model's layers have to be there; the scale needs none of its own."""
    module = ModuleType("flashinfer.jit.attention.modules")
    monkeypatch.setattr(module, "gen_batch_prefill_module", gen_batch_prefill_module, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flashinfer, "import_module", lambda name: sys.modules[name])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer.metadata, "version", lambda name: flashinfer.VERSION)
    monkeypatch.setattr(flashinfer, "_compiler", lambda: True)
    model = config(**fields)
    choice = choose("auto", GPU, model, HALF)
    assert (choice.backend, choice.fallback) == (backend, backend is TritonAttention)
    assert flashinfer.origin(model.head_dim, HALF, HALF, model.attention_specs) == origin
    assert choose("flashinfer", GPU, model, HALF).backend is FlashInferAttention, "it would compile the modules"
    monkeypatch.setattr(flashinfer, "_compiler", lambda: False)
    problem = FlashInferAttention.problem(GPU, model, HALF, HALF)
    assert (problem is None) == (backend is FlashInferAttention)


@pytest.mark.slow
def test_an_engine_answers_as_with_triton(tmp_path: Path) -> None:
    """On a late device, with a stand-in for FlashInfer that masks, caps and scales as its ``variants.cuh`` does."""
    model = make_checkpoint(tmp_path, "gemma2", num_hidden_layers=2)

    def answers(attention: str) -> list[wire.Reply]:
        return replies_at(never, lambda late: run(late.assemble(model, attention=attention), traffic(random.Random(3))[:4]))

    assert alike(*(msgspec.to_builtins(answers(attention)) for attention in ("flashinfer", "triton")))
