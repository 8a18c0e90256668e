"""Steps with adapters that are replayed from CUDA graphs, against the same steps launched, on a device that is late."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_checkpoint
from tests.engine.adapters import write_adapter
from tests.engine.parity import some_tokens
from tests.engine.test_graphs import a_segment
from tests.engine.test_late_gpu import Late, alike, never, plain, replies_at
from tests.engine.test_loop import run
from tests.engine.variants import Variants
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.lora import linear
from yardstick_llm.engine.models.lora.linear import CapturedRows
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels.lora import shrink_lora
from yardstick_llm.kernels.lora_layout import FEW_ROWS, ROW_BLOCKS

PRODUCTS = 4
"""Products of a layer with adapters on all projections."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of four adapters of other ranks and projections."""
    root, whole = tmp_path_factory.mktemp("adapters"), AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    kinds: list[dict[str, Any]] = [{}, {"targets": ("q_proj", "down_proj"), "rank": 7}, {"rank": 1}, {"rank": 8}]
    for seed, kind in enumerate(kinds):
        write_adapter(root / f"a{seed}", whole, seed=seed, **kind)
    return root


def messages(digests: list[str], rng: random.Random) -> list[wire.Request]:
    """Texts and scores of each, in any order, which share steps."""
    found: list[wire.Request] = []
    for index, digest in enumerate(digests):
        sampling = wire.Sampling(max_tokens=4, ignore_eos=True, seed=index, temperature=0.8 * (index % 2))
        found.append(wire.Generate(f"text {index}", some_tokens(rng, 2, 4), sampling, logprobs=0, adapter=digest))
        found.append(wire.Score(f"score {index}", [5, 6], [[7], [8, 9]], wire.Labels([5, 17]), adapter=digest))
    rng.shuffle(found)
    return found


def check(answers: Callable[[Late, str], list[wire.Reply]]) -> None:
    """``answers`` are the same with CUDA graphs and without."""
    launched, replayed = (
        sorted(map(plain, replies_at(never, partial(answers, graphs=graphs))), key=lambda reply: reply.id)
        for graphs in ("off", "on")
    )
    assert not [reply for reply in launched if isinstance(reply, wire.Failed)]
    assert alike(*map(msgspec.to_builtins, (replayed, launched)))


@pytest.mark.slow
def test_replayed_steps_answer_as_launched_steps(base: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters in two places, also after adapters were loaded and unloaded between replays. Replays launch nothing, and the
    graphs of the base model alone have no work for adapters."""
    launched: list[int] = []
    monkeypatch.setattr(linear, "shrink_lora", lambda x, *given: launched.append(len(x)) or shrink_lora(x, *given))

    def answers(late: Late, graphs: str) -> list[wire.Reply]:
        launched.clear()
        lora = [f"a{each}={adapters / f'a{each}'}" for each in range(3)]
        given = {"max_loras_device": 2, "max_lora_rank": 8, "lora_root": str(adapters), "max_batched_tokens": 16}
        loop = late.assemble(base, attention="flashinfer", cuda_graphs=graphs, lora=lora, **given)
        layer = loop._runner._decoder.layers[0]
        assert layer.attention.qkv_proj.defers
        assert isinstance(layer.mlp.gate, linear.AdaptedGate)
        captured, rng = len(launched), random.Random(1)
        replies = run(loop, *messages([""], rng))
        assert len(launched) == captured
        for changed in (False, True):
            if changed:
                loop.adapters.unload("a1")
                loop.adapters.load("new", adapters / "a3")
            digests = ["", *(each.digest for each in loop.adapters.description.adapters)]
            replies += run(loop, *messages(digests, rng))
        assert loop.stats.adapter_swaps >= 4
        if graphs == "on":
            assert captured == PRODUCTS * 2 * 2, "twice for each of two buckets, and not for the base model alone"
            assert (len(launched) == captured) == (loop.stats.replayed_steps == loop.stats.steps)
            assert loop.stats.replayed_steps > 0.8 * loop.stats.steps
        else:
            assert loop.stats.replayed_steps == captured == 0
        return replies

    check(answers)


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["lm_head", "embed_tokens"])
def test_whole_modules_of_adapters_beside_graphs(base: Path, tmp_path: Path, whole: str) -> None:
    """Two adapters with a module of their own on one place of a late device. Steps with an embedding are launched."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    paths = [write_adapter(tmp_path / f"a{seed}", model, ("o_proj",), seed=seed, whole=[whole]) for seed in range(2)]

    def answers(late: Late, graphs: str) -> list[wire.Reply]:
        given = {"max_loras_device": 1, "max_lora_rank": 4, "lora_modules": "all", "max_batched_tokens": 16}
        lora = [f"{path.name}={path}" for path in paths]
        loop = late.assemble(base, attention="flashinfer", cuda_graphs=graphs, lora=lora, **given)
        digests = ["", *(each.digest for each in loop.adapters.description.adapters)]
        replies = [*run(loop, *messages(digests, random.Random(1))), *run(loop, *messages([""], random.Random(2)))]
        assert (loop.stats.replayed_steps > 0) == (graphs == "on")
        assert (loop.stats.replayed_steps == loop.stats.steps) == (graphs == "on" and whole == "lm_head")
        return replies

    check(answers)


def kernels_of_adapters(variants: Variants) -> set[str]:
    return {each for each in variants.found if each.startswith(("_shrink", "_expand", "_lora_"))}


def test_capturing_compiles_what_launched_steps_need(base: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of both sizes, though all captured steps are small, and any rank."""
    variants = Variants(monkeypatch)
    lora = [f"a{each}={adapters / f'a{each}'}" for each in range(4)]
    settings = EngineSettings(
        model=str(base), name="t", lora=lora, max_lora_rank=8, dtype="float32", max_total_tokens=2000, attention="reference"
    )
    loop = build_loop(settings)
    runner = loop._runner
    runner._decoder.packed_head = None  # a GPU has none
    rows, slots = runner._adapters._rows, runner._adapters._slots
    buckets = (1, 4, FEW_ROWS + 16)
    captured = CapturedRows(rows, slots, 8, buckets)
    attention = ReferenceAttention(runner._attention.kv, runner._decoder.config.num_heads)
    with variants, torch.inference_mode():
        for size in buckets:
            context = torch.arange(size, dtype=torch.int32).numpy()
            tokens = torch.arange(size)
            with captured.captured(size):
                runner._decoder(tokens, tokens, attention.plan([a_segment(context, size)]))
    early = kernels_of_adapters(variants)
    assert len(early) == 2 * PRODUCTS * len(ROW_BLOCKS)
    assert len([each for each in early if "_expand" in each]) == 2 * len(ROW_BLOCKS), "the two others are fused"
    rng = random.Random(2)
    digests = [each.digest for each in loop.adapters.description.adapters]
    with variants:
        for digest in digests:
            run(loop, wire.Score("s", some_tokens(rng, 90, 90), [[5], [6, 7]], wire.Labels([5]), adapter=digest))
        run(loop, *messages(["", *digests], rng))
    assert kernels_of_adapters(variants) == early
