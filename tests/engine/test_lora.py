"""Requests with adapters against merged weights in transformers, however they share steps, slots and the device's memory."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import make_checkpoint
from tests.engine.adapters import ATTENTION, merge, write_adapter
from tests.engine.parity import some_tokens
from tests.engine.test_loop import run, tokens_of
from tests.processor import multiplies_bytes
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import lora, lora_gate, lora_rope

LABELS = [5, 17, 300]
KINDS: list[dict[str, Any]] = [
    {},
    {"targets": ("q_proj", "v_proj"), "rank": 8, "lora_alpha": 3},
    {"targets": (*ATTENTION, "down_proj"), "rank": 3, "rank_pattern": {"q_proj": 5, "o_proj": 1}, "alpha_pattern": {"v_proj": 7}},
    {"rank": 16, "use_rslora": True, "lora_alpha": 4},
    {"targets": ("gate_proj", "down_proj"), "rank": 2},
]
OTHERS = ("llama", "qwen2", "gemma2", "olmo2", "granite")
"""Families without norms of heads, with biases, with norms behind projections, with norms over all heads, with multipliers."""


class Model(NamedTuple):
    """A model with adapters, and transformers' models into which they are merged; the first is the base model."""

    directory: Path
    adapters: list[Path]
    merged: list[PreTrainedModel]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of qwen3 unless a test names a family."""
    directory = make_checkpoint(tmp_path_factory.mktemp("base"), getattr(request, "param", "qwen3"))

    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    root, base = tmp_path_factory.mktemp("adapters"), load()
    adapters = [write_adapter(root / f"a{seed}", base, seed=seed, **kind) for seed, kind in enumerate(KINDS)]
    return Model(directory, adapters, [base, *(merge(load(), adapter) for adapter in adapters)])


def build(model: Model, **settings: Any) -> Loop:
    defaults = {"max_total_tokens": 4096, "lora": [f"a{index}={path}" for index, path in enumerate(model.adapters)]}
    return build_loop(EngineSettings(model=str(model.directory), name="test", **(defaults | settings)))


def digests(loop: Loop) -> list[str]:
    """Return the digests of the base model and of all adapters."""
    return ["", *(adapter.digest for adapter in loop.adapters.description.adapters)]


@torch.inference_mode()
def expected_logprobs(model: PreTrainedModel, prefix: list[int], branches: list[list[int]]) -> list[list[float]]:
    return [model(torch.tensor([prefix + branch])).logits[0, -1].log_softmax(-1)[LABELS].tolist() for branch in branches]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def assert_merged(
    loop: Loop, model: Model, rng: random.Random, prefix: list[int], branches: list[list[int]], prompt: list[int]
) -> None:
    """Scores and greedy texts of the base model and all adapters, which share steps, are those of merged weights."""
    sampling = wire.Sampling(max_tokens=6, temperature=0, ignore_eos=True)
    messages: list[wire.Request] = []
    for index, digest in enumerate(digests(loop)):
        messages.append(wire.Score(f"s{index}", prefix, branches, wire.Labels(LABELS), adapter=digest))
        messages.append(wire.Generate(f"g{index}", prompt, sampling, adapter=digest))
    rng.shuffle(messages)
    replies = run(loop, *messages, checked=True)
    rows = {reply.id: reply.rows for reply in replies if isinstance(reply, wire.Scored)}
    for index, merged in enumerate(model.merged):
        wanted = expected_logprobs(merged, prefix, branches)
        torch.testing.assert_close(torch.tensor(rows[f"s{index}"]), torch.tensor(wanted), atol=1e-5, rtol=1e-5)
        assert tokens_of(replies, f"g{index}") == greedy(merged, prompt, 6), index
    assert rows["s0"] != rows["s1"]


FEW = {"max_total_tokens": 150, "max_batched_tokens": 33, "max_loras_device": 1, "overlap": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param("qwen3", FEW, id="qwen3-few slots of both kinds"),
        pytest.param("qwen2", FEW, id="qwen2-few slots of both kinds"),
    ],
    indirect=["model"],
    scope="module",
)
def test_mixed_steps_equal_merged_weights(model: Model, settings: dict[str, Any]) -> None:
    """Requests have equal tokens with each adapter and with none, so that a wrong tree of the prefix cache shows as well."""
    loop, rng = build(model, **settings), random.Random(1)
    prefix, branches = some_tokens(rng, 30, 30), [some_tokens(rng, 1, 12) for _ in range(3)]
    prompt = some_tokens(rng, 10, 10)
    for _ in ("cold", "warm"):
        assert_merged(loop, model, rng, prefix, branches, prompt)
    assert loop.stats.adapters == len(model.adapters)
    assert loop.stats.adapter_swaps >= len(model.adapters)


@pytest.mark.slow
def test_whole_modules_share_steps(model: Model, tmp_path: Path) -> None:
    """Adapters with a head for tokens, an embedding, both or none of their own, on one place of the device."""
    base = model.merged[0]
    kinds = [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens"), ()]
    adapters = [write_adapter(tmp_path / f"a{seed}", base, seed=seed, whole=kind) for seed, kind in enumerate(kinds)]

    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()

    own = Model(model.directory, adapters, [base, *(merge(load(), adapter) for adapter in adapters)])
    loop, rng = build(own, lora_modules="all", max_loras_device=1, max_batched_tokens=40), random.Random(1)
    assert loop._runner._adapters._slots.modules == {"lm_head": {}, "embed_tokens": {}}
    prefix, branches, prompt = some_tokens(rng, 30, 30), [some_tokens(rng, 1, 9) for _ in range(3)], some_tokens(rng, 10, 10)
    assert_merged(loop, own, rng, prefix, branches, prompt)
    on_device = loop._runner._adapters._slots.modules
    assert sum(map(len, on_device.values())) <= 2, "an adapter that leaves its place leaves nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kernels", "fused"),
    [
        pytest.param("qwen3", True, True, id="qwen3-fused kernels"),
        pytest.param("qwen3", True, False, id="qwen3-kernels"),
        *(pytest.param(name, False, True, id=f"{name}-fused references") for name in OTHERS),
    ],
    indirect=["model"],
    scope="module",
)
def test_kernels_equal_merged_weights(model: Model, kernels: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tables that the engine makes, while adapters change their slots; ``kernels``: in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr("yardstick_llm.engine.loop.build._fuses", lambda device: fused)
    launched: dict[str, set[int]] = {}

    def watch(module: ModuleType, name: str) -> None:
        operation = getattr(module, f"{name}_triton" if kernels else f"{name}_reference")

        def launch(rows: torch.Tensor, *given: Any, **named: Any) -> Any:
            launched.setdefault(name, set()).add(len(rows))
            return operation(rows, *given, **named)

        monkeypatch.setattr(module, f"{name}_reference", launch)

    for module, name in ((lora, "shrink_lora"), (lora, "expand_lora"), (lora_gate, "lora_gate"), (lora_rope, "lora_rope_write")):
        watch(module, name)
    loop = build(model, max_loras_device=2, max_batched_tokens=16)
    prefix, branches = list(range(10, 28)), [[3], [4, 5, 6]]
    messages = [
        wire.Score(str(index), prefix, branches, wire.Labels(LABELS), adapter=each) for index, each in enumerate(digests(loop))
    ]
    rows = {reply.id: reply.rows for reply in run(loop, *messages)}
    for index, merged in enumerate(model.merged):
        wanted = expected_logprobs(merged, prefix, branches)
        torch.testing.assert_close(torch.tensor(rows[str(index)]), torch.tensor(wanted), atol=1e-5, rtol=1e-5)
    assert {1, 16} <= launched["shrink_lora"], "of all rows, and of one row where none is read"
    assert len(launched["expand_lora"]) > 1, "of other projections"
    over_heads = loop._runner._decoder.config.qk_norm_over_heads
    assert launched.keys() - {"shrink_lora", "expand_lora"} == (
        set() if not fused else {"lora_gate"} if over_heads else {"lora_gate", "lora_rope_write"}
    )


@pytest.mark.slow
def test_catalogue_items_and_likelihoods(model: Model) -> None:
    loop, rng = build(model, max_loras_device=2), random.Random(2)
    items, query = [some_tokens(rng, 5, 20) for _ in range(6)], some_tokens(rng, 4, 4)
    packed = wire.pack_ids([token for item in items for token in item]), wire.pack_ids([len(item) for item in items])
    for _ in range(2):
        asked = [
            wire.ScoreItems(f"i{index}", *packed, query, wire.Labels(LABELS), adapter=digest)
            for index, digest in enumerate(digests(loop))
        ]
        found = {reply.id: reply for reply in run(loop, *asked, checked=True)}
        for index, merged in enumerate(model.merged):
            wanted = [expected_logprobs(merged, item, [query])[0] for item in items]
            torch.testing.assert_close(torch.tensor(found[f"i{index}"].rows), torch.tensor(wanted), atol=1e-5, rtol=1e-5)
    assert found["i1"].cached_items == len(items)
    (row,) = run(loop, wire.Score("l", items[0], [query], wire.Likelihood(), adapter=digests(loop)[1]))
    with torch.inference_mode():
        logits = model.merged[1](torch.tensor([items[0] + query])).logits[0].log_softmax(-1)
    at = range(len(items[0]) - 1, len(items[0]) + len(query) - 1)
    torch.testing.assert_close(torch.tensor(row.rows[0][:-1]), logits[list(at), query], atol=1e-5, rtol=1e-5)


def test_unloading_ends_no_request(model: Model) -> None:
    """Running requests go on with the old weights, even after the name has others; new requests for the old ones fail."""
    loop = build(model, max_loras_device=1)
    adapter, prompt = loop.adapters.description.adapters[0], list(range(10, 20))
    sampling = wire.Sampling(max_tokens=12, temperature=0, ignore_eos=True)
    loop.submit(wire.Generate("g", prompt, sampling, adapter=adapter.digest))
    replies = [reply for _ in range(4) for reply in loop.step()]
    loop.adapters.load("a0", model.adapters[1], replace=True)
    assert loop.adapters.get(adapter.digest) is None
    loop.submit(wire.Score("late", prompt, [[3]], wire.Labels(LABELS), adapter=adapter.digest))
    loop.submit(wire.Score("new", prompt, [[3]], wire.Labels(LABELS), adapter=loop.adapters.named("a0").digest))
    replies += run(loop)
    assert tokens_of(replies, "g") == greedy(model.merged[1], prompt, 12)
    (late,) = [reply for reply in replies if isinstance(reply, wire.Failed)]
    assert (late.id, late.code, late.retryable) == ("late", "unknown_adapter", True)
    (new,) = [reply for reply in replies if isinstance(reply, wire.Scored)]
    wanted = expected_logprobs(model.merged[2], prompt, [[3]])
    torch.testing.assert_close(torch.tensor(new.rows), torch.tensor(wanted), atol=1e-5, rtol=1e-5)
    loop.adapters.unload("a0")
    stats = loop.stats
    assert stats.adapters == len(model.adapters) - 1
    assert stats.adapter_bytes == sum(each.bytes for each in loop.adapters.description.adapters), "memory is freed"
    assert stats.refused_adapter == 1


def test_options_that_exclude_adapters_are_named(model: Model) -> None:
    with pytest.raises(ModelError, match="--tensor-parallel"):
        build(model, tensor_parallel=2)
    with pytest.raises(ModelError, match="--kv-dtype fp8"):
        build(model, kv_dtype="fp8")
    with pytest.raises(ModelError, match="NAME=PATH"):
        build(model, lora=["nothing"])


def test_a_head_of_an_adapter_classifies(model: Model, tmp_path: Path) -> None:
    """Beside scores of the base model, over a checkpoint without a head."""
    targets: dict[str, Any] = {"rank": 4, "classes": 3, "task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    adapters = [write_adapter(tmp_path / f"c{seed}", model.merged[0], seed=seed, **targets) for seed in (7, 8)]
    loop = build(model, lora=[f"c{index}={path}" for index, path in enumerate(adapters)], max_loras_device=1)
    prompt = list(range(20, 40))
    asked = [
        wire.Score(f"c{index}", prompt[:5], [prompt[5:]], wire.Classes(), adapter=digest)
        for index, digest in enumerate(digests(loop)[1:])
    ]
    replies = {reply.id: reply for reply in run(loop, *asked, wire.Score("b", prompt[:5], [prompt[5:]], wire.Labels(LABELS)))}
    for index, adapter in enumerate(adapters):
        merged = merge(AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval(), adapter, head=False)
        head = load_file(adapter / "adapter_model.safetensors")["base_model.model.score.weight"]
        with torch.inference_mode():
            wanted = merged.model(torch.tensor([prompt])).last_hidden_state[0, -1] @ head.T
        torch.testing.assert_close(torch.tensor(replies[f"c{index}"].rows[0]), wanted, atol=1e-5, rtol=1e-5)
    (refused,) = run(loop, wire.Score("x", prompt, [[3]], wire.Labels(LABELS), adapter=digests(loop)[1]))
    assert "cannot score" in refused.message


@multiplies_bytes
def test_the_int8_base_takes_adapters(model: Model) -> None:
    loop, prompt = build(model, quantize="int8"), list(range(10, 40))
    rows = [run(loop, wire.Score("s", prompt, [[3]], wire.Labels(LABELS), adapter=digest))[0].rows for digest in digests(loop)]
    for row, merged in zip(rows, model.merged, strict=True):
        wanted = torch.tensor(expected_logprobs(merged, prompt, [[3]]))
        torch.testing.assert_close(torch.tensor(row), wanted, atol=0.3, rtol=0.0)
