"""Adapters beside what else an engine does, against merged weights in transformers: number formats, readouts, fused projections,
mixtures of experts, length guidance and grammars."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import END_OF_TURN, make_checkpoint
from tests.engine.adapters import ALL, ATTENTION, merge, write_adapter
from tests.engine.lenvm.plain import GAMMA, Plain
from tests.engine.lenvm.writing import guidance, guided, make_pair, verify
from tests.engine.models.published_files import write_quantised
from tests.engine.parity import CLASSES, MODELS, Reference, assert_equal_rows, make_model, readouts_of, some_tokens
from tests.engine.test_loop import run
from tests.engine.test_lora import digests
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.gateway.output.constraint import of_regex
from yardstick_llm.kernels.quantize import quantize_rows_reference

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LABELS = [5, 17, 300]


def build(model: Path, *adapters: Path, **settings: Any) -> Loop:
    lora = [f"a{index}={path}" for index, path in enumerate(adapters)]
    return build_loop(EngineSettings(model=str(model), name="test", lora=lora, **({"max_total_tokens": 2048} | settings)))


def load(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@torch.inference_mode()
def logprobs(model: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """[prompts, labels]"""
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[LABELS] for prompt in prompts])


def scores(loop: Loop, digest: str, prompts: list[list[int]]) -> Tensor:
    """[prompts, labels]"""
    (reply,) = run(loop, wire.Score("s", prompts[0][:4], [prompt[4:] for prompt in prompts], wire.Labels(LABELS), adapter=digest))
    return torch.tensor(reply.rows)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "targets"), [("phi3", FUSED), ("qwen2_moe", ALL), ("qwen3_moe", ATTENTION)])
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "at once"])
def test_fused_projections_and_experts(
    tmp_path: Path, family: str, targets: tuple[str, ...], deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of the mixture of experts with ``mlp_only_layers`` is dense, and its MLP has adapters. ``deferred``: the operations
    behind projections make additions, as on a GPU."""
    monkeypatch.setattr("yardstick_llm.engine.loop.build._fuses", lambda device: deferred)
    model = make_checkpoint(tmp_path / "base", family)
    kinds: list[dict[str, Any]] = [{}, {"targets": targets[:1], "rank": 7}]
    adapters = [
        write_adapter(tmp_path / f"a{seed}", load(model), seed=seed, **({"targets": targets} | kind))
        for seed, kind in enumerate(kinds)
    ]
    loop, rng = build(model, *adapters, max_loras_device=1), random.Random(1)
    start = some_tokens(rng, 4, 4)
    prompts = [start + some_tokens(rng, 1, 60) for _ in range(4)]
    merged = [load(model), *(merge(load(model), adapter) for adapter in adapters)]
    asked = [
        wire.Score(f"s{index}", start, [prompt[4:] for prompt in prompts], wire.Labels(LABELS), adapter=digest)
        for index, digest in enumerate(digests(loop))
    ]
    rows = {reply.id: torch.tensor(reply.rows) for reply in run(loop, *asked)}
    for index, whole in enumerate(merged):
        torch.testing.assert_close(rows[f"s{index}"], logprobs(whole, prompts), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(rows["s0"], rows["s1"], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_readout_of_an_adapter(tmp_path: Path, kind: str) -> None:
    """Labels, likelihoods, embeddings of both poolings, and a classification head over that of the base model."""
    model = make_model(tmp_path / "base", "qwen3", kind)
    base, adapted = Reference(model, "qwen3", kind), Reference(model, "qwen3", kind)
    head: dict[str, Any] = {"classes": CLASSES, "task_type": "SEQ_CLS", "modules_to_save": ["score"]} if kind == "classes" else {}
    adapter = write_adapter(tmp_path / "a", base.model, **({"task_type": "FEATURE_EXTRACTION"} | head))
    merge(adapted.model, adapter)
    loop, rng = build(model, adapter), random.Random(2)
    for place, readout in enumerate(readouts_of(kind)):
        prefix = [] if isinstance(readout, wire.Embedding) else some_tokens(rng, 4, 20)
        branches = [some_tokens(rng, 1, 30) for _ in range(3)]
        asked = [wire.Score(f"{place} {digest}", prefix, branches, readout, adapter=digest) for digest in digests(loop)]
        rows = {reply.id: reply.rows for reply in run(loop, *asked)}
        for message, reference in zip(asked, (base, adapted), strict=True):
            assert_equal_rows(rows[message.id], reference.rows(message))
        assert rows[asked[0].id] != rows[asked[1].id]


class RoundedLinear(nn.Module):
    """A projection whose weight and input are rounded to FP8, beside an adapter that is not."""

    def __init__(self, plain: nn.Linear, merged: nn.Linear, *, shared: bool) -> None:
        """``shared``: whether the adapter reads the rounded input."""
        super().__init__()
        self.weight, self.bias = rounded(plain.weight.data), plain.bias
        self.addition = merged.weight.data - plain.weight.data
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        rows = rounded(x.flatten(0, -2)).view(x.shape)
        product = rows @ self.weight.T + (rows if self.shared else x) @ self.addition.T
        return product if self.bias is None else product + self.bias


def test_codes_of_a_quantised_checkpoint_take_adapters(tmp_path: Path) -> None:
    """The weights that the codes stand for, and on top of them an adapter, merged."""
    rng, source, adapter = random.Random(2), make_checkpoint(tmp_path / "source", "qwen2"), tmp_path / "adapter"
    quantised, dense = write_quantised(source, tmp_path, "w4a16 asymmetric")
    write_adapter(adapter, load(dense), ALL, seed=1, rank=4)
    loop, start = build(quantised, adapter, dequantize="off"), some_tokens(rng, 4, 4)
    assert loop.info.arithmetic == "float32, codes of compressed-tensors"
    prompts = [start + some_tokens(rng, 20, 40) for _ in range(4)]
    for digest, merged in zip(digests(loop), (load(dense), merge(load(dense), adapter)), strict=True):
        torch.testing.assert_close(scores(loop, digest, prompts), logprobs(merged, prompts), rtol=0, atol=1e-4)


def rounded(x: Tensor) -> Tensor:
    codes, scales = quantize_rows_reference(x)
    return codes.float() * scales


def rounding(plain: PreTrainedModel, merged: PreTrainedModel) -> PreTrainedModel:
    """``merged`` with the layers' products in FP8."""
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            shared = not name.endswith("o_proj")
            merged.set_submodule(name, RoundedLinear(module, merged.get_submodule(name), shared=shared))
    return merged


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_the_fp8_base_takes_adapters(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of the base's products are rounded in transformers, too. A code that falls to the other side for a difference in the
    last bit changes others behind it, so some prompts differ more. Additions are made as on a GPU."""
    monkeypatch.setattr("yardstick_llm.engine.loop.build._fuses", lambda device: True)
    model, rng = make_checkpoint(tmp_path / "base", family), random.Random(3)
    adapters = [
        write_adapter(tmp_path / f"a{seed}", load(model), FUSED if family == "phi3" else ALL, seed=seed, rank=rank)
        for seed, rank in enumerate((4, 9))
    ]
    loop, start = build(model, *adapters, quantize="fp8"), some_tokens(rng, 4, 4)
    layer = loop._runner._decoder.layers[0]
    assert layer.attention.qkv_proj.defers
    assert not layer.mlp.gate_up_proj.defers, "its gate quantises whole rows"
    prompts = [start + some_tokens(rng, 20, 40) for _ in range(12)]
    for digest, adapter in zip(digests(loop), (None, *adapters), strict=True):
        merged = load(model) if adapter is None else merge(load(model), adapter)
        plain, found = logprobs(merged, prompts), scores(loop, digest, prompts)
        expected = logprobs(rounding(load(model), merged), prompts)
        cost, differences = (expected - plain).norm(dim=1), (found - expected).norm(dim=1)
        assert 0.005 < cost.norm() / plain.norm() < 0.25
        assert differences.median() < 0.05 * cost.median()


@pytest.mark.slow
def test_the_length_model_guides_an_adapter(tmp_path: Path) -> None:
    """Candidates and their probabilities are those of the merged weights, and the length model is unchanged."""
    base, length = make_pair(tmp_path, "qwen3+llama")
    adapter = write_adapter(tmp_path / "a", load(base))
    loop = build(base, adapter, lenvm_model=str(length), lenvm_gamma=GAMMA, overlap=True)
    rng, plain = random.Random(4), [Plain(base, length), Plain(base, length)]
    merge(plain[1].base, adapter)
    modes: list[dict[str, Any]] = [{"scale": 3.0}, {"constraint": "le", "target_length": 4}, {"mode": "length_mul", "scale": 2.0}]
    messages = [
        (index, msgspec.structs.replace(guided(f"{place} {index}", some_tokens(rng, 1, 30), guidance(**mode)), adapter=digest))
        for place, mode in enumerate(modes)
        for index, digest in enumerate(digests(loop))
    ]
    replies = run(loop, *(message for _, message in messages))
    for index, message in messages:
        deltas = [reply for reply in replies if reply.id == message.id]
        assert all(isinstance(delta, wire.Delta) for delta in deltas), deltas
        assert verify(plain[index], message, deltas) > 0


@pytest.mark.slow
def test_a_grammar_restricts_an_adapter(tmp_path: Path) -> None:
    """The most probable of the letters that the grammar allows, by merged weights; requests of both models share the steps."""
    model = make_checkpoint(tmp_path / "base", "qwen3")
    adapters = [write_adapter(tmp_path / f"a{seed}", load(model), seed=seed) for seed in range(2)]
    loop, rng = build(model, *adapters, overlap=True, threads=1), random.Random(5)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    letters = [tokenizer.token_to_id(letter) for letter in "abcdefgh"]
    sampling, prompt = wire.Sampling(max_tokens=20, temperature=0), some_tokens(rng, 10, 10)
    asked = [
        wire.Generate(f"g{index}", prompt, sampling, grammar=of_regex("[a-h]{12}"), adapter=digest)
        for index, digest in enumerate(digests(loop))
    ]
    replies, texts = run(loop, *asked), []
    for index, adapter in enumerate((None, *adapters)):
        merged = load(model) if adapter is None else merge(load(model), adapter)
        expected = [*restricted(merged, prompt, letters, 12), END_OF_TURN]
        texts.append([token for reply in replies if reply.id == f"g{index}" for token in reply.tokens])
        assert texts[-1] == expected
    assert len(set(map(tuple, texts))) == 3
    loop.close()


@torch.inference_mode()
def restricted(model: PreTrainedModel, prompt: list[int], allowed: list[int], count: int) -> list[int]:
    """The greedy text of ``allowed`` tokens."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens])).logits[0, -1, allowed]
        tokens.append(allowed[int(logits.argmax())])
    return tokens[len(prompt) :]
