"""No kernel is compiled once the engine is ready: what random traffic launches, the requests of the start have launched before."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import msgspec
import pytest
from transformers import AutoModel, AutoModelForCausalLM

from tests.checkpoints import CLASSIFIERS, HEADLESS, make_checkpoint, write_pooling
from tests.engine.adapters import ALL, write_adapter
from tests.engine.lenvm.plain import make_lenvm_checkpoint
from tests.engine.lenvm.writing import run
from tests.engine.parity import some_tokens
from tests.engine.variants import Variants
from tests.engine.vision.models import make_vision_checkpoint, shown, some_image, some_text
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop import build
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats import packed
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.runner import graphs as compilations
from yardstick_llm.engine.runner.graphs import BUCKETS, Compilations
from yardstick_llm.engine.runner.readouts.scores import LabelReadout
from yardstick_llm.engine.runner.runner import PendingStep, Runner
from yardstick_llm.engine.server.metrics import render
from yardstick_llm.engine.settings import EngineSettings

SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
ODD_VOCABULARY = 323
GRAMMAR = 'start: "a" "b"*'


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    monkeypatch.setattr(build, "_compiles", lambda device: True)
    monkeypatch.setattr(packed, "suits", lambda device, dtype: False)  # kernels do not read packed heads
    return Variants(monkeypatch)


def settings(model: Path, **changes) -> EngineSettings:
    defaults = {"max_total_tokens": 4000, "attention": "triton", "overlap": True, "dtype": "float32"}
    return EngineSettings(model=str(model), name="t", **(defaults | changes))


def scores(rng: random.Random) -> list[wire.Request]:
    """Any numbers of labels and items, of equal and of different lengths."""
    readouts = [
        *(wire.Labels([rng.randrange(320) for _ in range(labels)], raw=labels == 4) for labels in (1, 2, 3, 4, 7, 16, 17)),
        wire.Likelihood(),
    ]
    return [
        wire.Score(f"s{place}", some_tokens(rng, 1, 40), [some_tokens(rng, 1, 9) for _ in range(rng.choice((1, 3, 20)))], readout)
        for place, readout in enumerate(readouts)
    ]


def generations(rng: random.Random) -> list[wire.Request]:
    ways = [
        {"temperature": 0.0},
        {"seed": 3},
        {"top_k": 3},
        {"top_p": 0.5, "min_p": 0.1, "n": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 3},
        {"allowed_token_ids": (5, 300)},
        {"allowed_token_ids": (5, 6, 7), "top_k": 2},
        {"logit_bias": {7: 2.0}, "bad_words": ((4, 5), (6,))},
    ]
    found: list[wire.Request] = [
        wire.Generate(
            f"g{place}",
            some_tokens(rng, 1, 60),
            wire.Sampling(max_tokens=rng.randint(2, 6), **way),
            logprobs=rng.choice((None, 0, 3, 20)),
            prompt_logprobs=rng.choice((None, 2)),
        )
        for place, way in enumerate(ways)
    ]
    return [*found, wire.Generate("grammar", some_tokens(rng, 1, 5), wire.Sampling(max_tokens=4), grammar=GRAMMAR)]


def guided(rng: random.Random) -> list[wire.Request]:
    found: list[wire.Request] = [
        wire.Generate(
            f"l{place}",
            some_tokens(rng, 1, 300 if place == 0 else 30),
            wire.Sampling(max_tokens=4, ignore_eos=True, n=n),
            logprobs=place % 3 or None,
            length_guidance=wire.LengthGuidance(scale=2.0, top_k=top_k),
        )
        for place, (top_k, n) in enumerate([(5, 1), (2, 3), (9, 1), (40, 2), (64, 1), (5, 9)])
    ]
    return [*found, wire.Score("value", some_tokens(rng, 0, 9), [some_tokens(rng, 1, 9)] * 3, wire.LengthValue())]


def nothing_new(variants: Variants, loop: Loop, requests: list[wire.Request], seed: int) -> None:
    """Each request alone, then all at once in any order."""
    early, rng = set(variants.found), random.Random(seed)
    assert early
    with variants:
        for request in requests:
            run(loop, request)
        rng.shuffle(requests)
        replies = run(loop, *requests)
    assert not [reply for told in replies.values() for reply in told if isinstance(reply, wire.Failed)]
    assert sorted(variants.found - early) == []
    assert not variants.jiterated


@pytest.mark.parametrize(("vocab_size", "kv_dtype"), [(ODD_VOCABULARY, "auto"), pytest.param(320, "fp8", marks=pytest.mark.slow)])
def test_scores_and_generations(variants: Variants, tmp_path: Path, vocab_size: int, kv_dtype: str) -> None:
    model = make_checkpoint(tmp_path, "qwen3", **SHAPE, vocab_size=vocab_size)
    loop = build_loop(settings(model, kv_dtype=kv_dtype))
    assert loop.stats.steps == loop.stats.computed_tokens == loop.stats.slots_cached == 0
    rng = random.Random(vocab_size)
    nothing_new(variants, loop, [*scores(rng), *generations(rng)], vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_windows_soft_caps_and_experts(variants: Variants, tmp_path: Path, family: str) -> None:
    loop = build_loop(settings(make_checkpoint(tmp_path, family, **SHAPE | {"num_hidden_layers": 2})))
    rng = random.Random(1)
    nothing_new(variants, loop, [*scores(rng), *generations(rng)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embeddings", "scores", "fp8"])
def test_adapters(variants: Variants, tmp_path: Path, kind: str) -> None:
    """Adapters of any rank, in steps of few and many rows, beside requests without one; ``fp8``: over a base in FP8."""
    model_class = HEADLESS["qwen3"] if kind == "embeddings" else None
    model = make_checkpoint(tmp_path / "model", "qwen3", model_class=model_class, **SHAPE)
    if kind == "embeddings":
        write_pooling(model)
    loaded = AutoModel.from_pretrained(model) if kind == "embeddings" else AutoModelForCausalLM.from_pretrained(model)
    paths = [
        write_adapter(tmp_path / name, loaded, targets, rank=rank)
        for name, rank, targets in (("a", 3, ALL), ("b", 8, ("q_proj", "down_proj")), ("c", 16, ALL), ("d", 32, ("gate_proj",)))
    ]
    if kind == "scores":
        paths.append(write_adapter(tmp_path / "e", loaded, ("q_proj",), whole=("lm_head", "embed_tokens")))
    given = {"lora": [f"{path.name}={path}" for path in paths], "max_loras_device": 3, "lora_modules": "all"}
    loop = build_loop(settings(model, quantize="fp8" if kind == "fp8" else None, **given))
    assert loop.stats.adapter_swaps == 0
    for kernel in ("_shrink", "_expand", "_lora_rope_write", *(() if kind == "fp8" else ("_lora_gate",))):
        assert any(found.startswith(kernel) for found in variants.found), kernel
    rng, digests = random.Random(1), ["", *(adapter.digest for adapter in loop.adapters.description.adapters)]
    asked: list[wire.Request] = []
    for digest in digests:
        if kind == "embeddings":
            items = [[some_tokens(rng, 1, 9) for _ in range(count)] for count in (1, 5, 50)]
            own: list[wire.Request] = [wire.Score(str(len(each)), [], each, wire.Embedding()) for each in items]
        else:
            own = [*rng.sample(scores(rng), 3), *rng.sample(generations(rng)[:-1], 3)]
        asked += [msgspec.structs.replace(request, id=f"{request.id} {digest}", adapter=digest) for request in own]
    nothing_new(variants, loop, asked, 1)
    assert loop.stats.adapter_swaps >= len(paths)


@pytest.mark.slow
def test_guided_generations(variants: Variants, tmp_path: Path) -> None:
    vocab_size = ODD_VOCABULARY
    base = make_checkpoint(tmp_path / "base", "qwen2", **SHAPE, vocab_size=vocab_size)
    lenvm = make_lenvm_checkpoint(tmp_path / "lenvm", "qwen3", **SHAPE, vocab_size=vocab_size)
    loop = build_loop(settings(base, lenvm_model=str(lenvm), lenvm_gamma=0.9))
    rng = random.Random(vocab_size)
    nothing_new(variants, loop, [*guided(rng), *generations(rng)[:4], *scores(rng)[:3]], vocab_size)


@pytest.mark.parametrize("kind", [pytest.param("classes", marks=pytest.mark.slow), "embeddings"])
def test_heads(variants: Variants, tmp_path: Path, kind: str) -> None:
    model_class = {"classes": CLASSIFIERS, "embeddings": HEADLESS}[kind]["qwen3"]
    model = make_checkpoint(tmp_path, "qwen3", model_class=model_class, **SHAPE)
    if kind == "embeddings":
        write_pooling(model)
    loop = build_loop(settings(model))
    readout = wire.Classes() if kind == "classes" else wire.Embedding()
    rng = random.Random(1)
    items = [[some_tokens(rng, 1, 70) for _ in range(count)] for count in (1, 5, 30)]
    prefix = [] if kind == "embeddings" else [3]
    nothing_new(variants, loop, [wire.Score(str(len(each)), prefix, each, readout) for each in items], 1)


@pytest.mark.slow
def test_images(variants: Variants, tmp_path: Path) -> None:
    """Images of any size, several in a prompt, beside text and in branches."""
    shape = {"num_hidden_layers": 1, "vocab_size": ODD_VOCABULARY}
    loop = build_loop(settings(make_vision_checkpoint(tmp_path, text=shape, depth=2, fullatt_block_indexes=[1])))
    assert (loop.stats.computed_images, loop.stats.tower_seconds) == (0, 0.0)
    rng, sizes = random.Random(2), [(2, 2), (6, 14), (16, 16), (20, 22)]
    images = [some_image(place, *size) for place, size in enumerate(sizes)]
    prompts = [some_text(rng, 1, 9) + shown(place, image) + some_text(rng, 1, 4) for place, image in enumerate(images)]
    sampling = wire.Sampling(max_tokens=3, ignore_eos=True)
    asked: list[wire.Request] = [
        wire.Generate(f"i{place}", prompt, sampling, logprobs=place or None, images=images) for place, prompt in enumerate(prompts)
    ]
    asked.append(wire.Generate("two", prompts[0] + prompts[1], sampling, images=images))
    asked.append(wire.Score("items", prompts[2], [shown(0, images[0]), some_text(rng, 1, 9)], wire.Labels([5, 9]), images=images))
    nothing_new(variants, loop, [*asked, *scores(rng)[:3]], 2)
    assert loop.stats.computed_images == len(images)


@pytest.mark.parametrize(("tokens", "expected"), [(900, 900), (3000, BUCKETS[-1] + 1)])
def test_one_step_is_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, expected: int) -> None:
    """Otherwise the first large request would be the first to use FlashInfer."""
    monkeypatch.setattr(build, "_compiles", lambda device: True)
    launch, found = Runner.launch, []

    def launched(runner: Runner, batch: Batch) -> PendingStep:
        found.append(batch.tokens)
        return launch(runner, batch)

    monkeypatch.setattr(Runner, "launch", launched)
    model = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    build_loop(settings(model, attention="reference", max_batched_tokens=tokens))
    assert max(found) >= expected


def test_progress_and_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "_compiles", lambda device: True)
    monkeypatch.setattr("yardstick_llm.engine.loop.warm_up.REPORT_SECONDS", 0.0)
    given = settings(make_checkpoint(tmp_path, "qwen3", **SHAPE), attention="reference")
    with caplog.at_level(logging.INFO, "yardstick_llm.engine.loop.warm_up"):
        build_loop(given)
    assert caplog.messages[0].startswith("warming up: 0 of ")
    assert caplog.messages[-1].startswith("warmed up: 0 kernels compiled or loaded, ")

    def broken(*_) -> None:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(LabelReadout, "queue", broken)
    with pytest.raises(ModelError, match="cannot compute 16 items when it starts: The engine failed in this step"):
        build_loop(given)


def test_late_compilations_are_counted_and_logged(monkeypatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """As Triton calls its hook, with what it passes."""

    class Triton:
        class knobs:
            class runtime:
                jit_post_compile_hook = None

    monkeypatch.setattr(compilations, "triton", Triton)
    monkeypatch.setattr(compilations, "INTERPRETED", False)
    monkeypatch.setattr(compilations, "AVAILABLE", True)
    counted = Compilations()
    given = {"key": "k", "fn": None, "compile": {}, "is_manual_warmup": False, "already_compiled": False}
    Triton.knobs.runtime.jit_post_compile_hook(repr="_gather[num_warps=4](...)", **given)
    counted.ready()
    assert (counted.early, counted.late) == (1, 0)
    Triton.knobs.runtime.jit_post_compile_hook(repr="_gather[num_warps=8](...)", **given)
    assert (counted.early, counted.late) == (1, 1)
    assert caplog.messages == ["compiled a kernel while requests waited: _gather[num_warps=8](...)"]
    monkeypatch.setattr(compilations, "AVAILABLE", False)
    loop = build_loop(settings(make_checkpoint(tmp_path, "qwen3", **SHAPE), attention="reference"))
    loop._compilations = counted
    assert "yardstick_engine_late_compilations_total 1.0" in render(loop.stats)
