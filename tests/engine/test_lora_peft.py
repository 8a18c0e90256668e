"""Adapters that PEFT has written, after some steps of training, against the model into which PEFT merges them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tests.checkpoints import CLASSIFIERS, make_checkpoint
from tests.engine.parity import some_tokens
from tests.engine.test_loop import run, tokens_of
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings

# PEFT asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LABELS = [5, 17, 300]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "every layer": {"target_modules": "all-linear", "r": 5, "lora_alpha": 3, "lora_dropout": 0.1},
    "rslora": {"target_modules": PROJECTIONS, "r": 16, "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"o_proj": 3, "layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {"up_proj": 2, "^model.layers.0.self_attn.o_proj": 9},
    },
    "some layers": {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    "an expression": {"target_modules": r"^(model(?=\.).*\.(q_proj|v_proj))$", "init_lora_weights": "gaussian"},  # as of ms-swift
}


@pytest.fixture(scope="module", params=["qwen3", pytest.param("phi3", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), request.param, num_hidden_layers=2)


def train(adapted: peft.PeftModel, labels: Tensor | None = None) -> None:
    """Some large steps on random tokens, so that no matrix is as it was initialised."""
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=2.0)
    tokens = torch.randint(3, 320, (4, 12), generator=torch.Generator().manual_seed(0))
    adapted.train()
    for _ in range(3):
        loss = adapted(tokens, labels=tokens if labels is None else labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapted.parameters(), 1.0)
        optimizer.step()


def write(model: Path, directory: Path, **config: Any) -> PreTrainedModel:
    """Train an adapter, save it as PEFT does, and return the merged model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        settings = peft.LoraConfig(task_type="CAUSAL_LM", **({"target_modules": default_targets(base)} | config))
        adapted = peft.get_peft_model(base, settings)
        train(adapted)
    adapted.save_pretrained(str(directory))
    return adapted.merge_and_unload().eval()  # type: ignore[no-any-return]


def default_targets(base: PreTrainedModel) -> list[str]:
    return ["qkv_proj"] if base.config.model_type == "phi3" else ["q_proj", "v_proj"]


def build(model: Path, lora_modules: str = "score", **adapters: Path) -> Loop:
    lora = [f"{name}={path}" for name, path in adapters.items()]
    return build_loop(EngineSettings(model=str(model), name="test", max_total_tokens=2048, lora=lora, lora_modules=lora_modules))


@torch.inference_mode()
def logprobs(model: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """[prompts, labels]"""
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[LABELS] for prompt in prompts])


@pytest.mark.slow
def test_adapters_score_as_peft_merges_them(model: Path, tmp_path: Path) -> None:
    """All of them in one step. A family with fused projections has other names, so only the kinds that name none."""
    fused = AutoModelForCausalLM.from_pretrained(model).config.model_type == "phi3"
    kinds = {name: kind for name, kind in KINDS.items() if not fused or name in ("defaults", "every layer")}
    merged = {name: write(model, tmp_path / name, **kind) for name, kind in kinds.items()}
    loop, rng = build(model, **{name.replace(" ", "-"): tmp_path / name for name in kinds}), random.Random(1)
    start = some_tokens(rng, 4, 4)
    prompts = [start + some_tokens(rng, 1, 40) for _ in range(4)]
    digests = {adapter.name: adapter.digest for adapter in loop.adapters.description.adapters}
    asked = [
        wire.Score(name, start, [prompt[4:] for prompt in prompts], wire.Labels(LABELS), adapter=digests[name.replace(" ", "-")])
        for name in kinds
    ]
    rows = {reply.id: torch.tensor(reply.rows) for reply in run(loop, *asked)}
    base = logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), prompts)
    for name, whole in merged.items():
        assert (rows[name] - base).abs().max() > 0.01, "the training has changed the model"
        torch.testing.assert_close(rows[name], logprobs(whole, prompts), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_whole_modules_score_and_write_as_peft_merges_them(tmp_path: Path, tied: bool) -> None:
    """In one step with an adapter that has none: labels, label logits, likelihoods and greedy tokens."""
    model = make_checkpoint(tmp_path / "base", "gemma2", num_hidden_layers=2, tie_word_embeddings=tied)
    kinds = {"none": [], "head": ["lm_head"], "embedding": ["embed_tokens"], "both": ["lm_head", "embed_tokens"]}
    merged = {name: write(model, tmp_path / name, modules_to_save=kind or None) for name, kind in kinds.items()}
    if tied:
        kinds["tied"] = ["embed_tokens"]
        merged["tied"] = write(model, tmp_path / "tied", modules_to_save=kinds["tied"], ensure_weight_tying=True)
    loop, rng = build(model, "all", **{name: tmp_path / name for name in kinds}), random.Random(1)
    merged["base"] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    start = some_tokens(rng, 4, 4)
    prompts = [start + some_tokens(rng, 1, 20) for _ in range(3)]
    digests = {adapter.name: adapter.digest for adapter in loop.adapters.description.adapters} | {"base": ""}
    branches = [prompt[4:] for prompt in prompts]
    readouts = {"labels": wire.Labels(LABELS), "raw": wire.Labels(LABELS, raw=True), "likelihood": wire.Likelihood()}
    asked: list[wire.Request] = [
        wire.Score(f"{kind} {name}", start, branches, readout, adapter=digests[name])
        for name in merged
        for kind, readout in readouts.items()
    ]
    sampling = wire.Sampling(max_tokens=4, temperature=0, ignore_eos=True)
    asked += [wire.Generate(f"text {name}", prompts[0], sampling, prompt_logprobs=0, adapter=digests[name]) for name in merged]
    rng.shuffle(asked)
    replies = run(loop, *asked)
    rows = {reply.id: reply.rows for reply in replies if isinstance(reply, wire.Scored)}
    for name, whole in merged.items():
        with torch.inference_mode():
            logits = [whole(torch.tensor([prompt])).logits[0] for prompt in prompts]
            text = whole.generate(torch.tensor([prompts[0]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)[0]
        assert_close(rows[f"labels {name}"], [each[-1].log_softmax(-1)[LABELS].tolist() for each in logits])
        assert_close(rows[f"raw {name}"], [each[-1][LABELS].tolist() for each in logits])
        for row, each, branch in zip(rows[f"likelihood {name}"], logits, branches, strict=True):
            assert_close(row[:-1], each[3:-1].log_softmax(-1)[range(len(branch)), branch].tolist())
        assert tokens_of(replies, f"text {name}") == text[len(prompts[0]) :].tolist()
        told = [reply.prompt_logprobs.chosen for reply in replies if reply.id == f"text {name}" and reply.prompt_logprobs]
        own = logits[0][:-1].log_softmax(-1)[range(len(prompts[0]) - 1), prompts[0][1:]]
        assert_close([value for part in told for value in part][1:], own.tolist())
    assert len({str(rows[f"labels {name}"]) for name in merged}) == len(merged)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_classifier_with_a_trained_head(tmp_path: Path) -> None:
    """PEFT saves the head of a classification model, and the names of its classes are beside the base model."""
    model = make_checkpoint(tmp_path / "base", "qwen3", model_class=CLASSIFIERS["qwen3"], num_labels=4, num_hidden_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
        base.config.pad_token_id = 0
        before = base.score.weight.detach().clone()
        adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", target_modules=PROJECTIONS))
        train(adapted, torch.tensor([0, 1, 2, 3]))
    adapted.save_pretrained(str(tmp_path / "a"))
    merged = adapted.merge_and_unload().eval()
    assert not torch.equal(merged.score.weight, before), "the head was trained"
    loop = build(model, a=tmp_path / "a")
    (adapter,) = loop.adapters.description.adapters
    assert (adapter.capabilities[0], len(adapter.classes)) == ("classify", 4)
    prompt = some_tokens(random.Random(2), 20, 20)
    (reply,) = run(loop, wire.Score("c", prompt[:5], [prompt[5:]], wire.Classes(), adapter=adapter.digest))
    with torch.inference_mode():
        expected = merged(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.tensor(reply.rows[0]), expected, atol=1e-5, rtol=1e-5)
