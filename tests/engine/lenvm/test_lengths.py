"""The effect of guidance on the lengths of texts: the demo models, the engine's own loop, many texts."""

from __future__ import annotations

import json
import shutil
import statistics
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from examples.demo_models.corpus.documents import draw_request
from examples.demo_models.text import load_tokenizer
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 400
TEXTS = 8
TOP_K = 5
MIN_P = 0.01
"""With constraints, as the gateway sends it: candidates that make no sense would be taken for their length."""


@cache
def loop() -> Loop:
    base, length = str(MODELS / "base"), str(MODELS / "lenvm")
    settings = EngineSettings(model=base, name="demo", lenvm_model=length, max_total_tokens=80_000, max_wait_seconds=3600)
    return build_loop(settings)


@cache
def prompts() -> list[list[int]]:
    """Requests for descriptions of products that training never saw."""
    rng, tokenizer = Random(5), load_tokenizer(MODELS / "base")
    return [tokenizer.encode(draw_request(rng, held_out=True)[0]).ids for _ in range(TEXTS)]


@cache
def written(guidance: wire.LengthGuidance | None, min_p: float = 0.0) -> list[list[int]]:
    """One text a prompt, of which the seed is the number: the noise of a draw is the same whatever the guidance."""
    for place, prompt in enumerate(prompts()):
        sampling = wire.Sampling(max_tokens=LIMIT, seed=place, top_k=TOP_K, min_p=min_p)
        loop().submit(wire.Generate(f"{place}", prompt, sampling, length_guidance=guidance))
    texts: list[list[int]] = [[] for _ in range(TEXTS)]
    while not loop().idle:
        for reply in loop().step():
            assert isinstance(reply, wire.Delta), reply
            texts[int(reply.id)] += reply.tokens
    return texts


def length(text: list[int]) -> int:
    """Without the ending token."""
    return len(text) - ended(text)


def ended(text: list[int]) -> bool:
    return text[-1] in loop().info.eos_token_ids


def mean(guidance: wire.LengthGuidance | None) -> float:
    return statistics.mean(length(text) for text in written(guidance))


def at(scale: float) -> wire.LengthGuidance:
    return wire.LengthGuidance(scale=scale)


def aimed(constraint: wire.LengthConstraint, target: int) -> list[int]:
    """Lengths of texts."""
    guidance = wire.LengthGuidance(constraint=constraint, target_length=target)
    return [length(text) for text in written(guidance, MIN_P)]


def test_mean_lengths_are_ordered_by_scale() -> None:
    """Ten below zero halves the length, and texts end at a moderate scale."""
    means = [mean(at(scale)) for scale in (-40, -10, 0, 10)]
    for smaller, larger in pairwise(means):
        assert larger > 1.2 * smaller, means
    assert mean(at(-10)) <= mean(at(0)) / 2
    assert statistics.mean(ended(text) for text in written(at(10))) >= 0.95


def test_drawn_texts_are_about_as_long_as_asked() -> None:
    assert statistics.mean(abs(tokens - 20) / 20 for tokens in aimed("about", 20)) <= 0.15


def test_texts_have_the_length_that_was_asked_for() -> None:
    lengths = aimed("eq", 120)
    assert statistics.mean(abs(tokens - 120) / 120 for tokens in lengths) <= 0.15
    assert statistics.mean(lengths) == pytest.approx(120, rel=0.05)


def test_the_mean_of_soft_targets_is_near() -> None:
    assert statistics.mean(aimed("eq_soft", 80)) == pytest.approx(80, rel=0.15)


def test_budgets_are_kept() -> None:
    part = round(mean(None) / 2)
    assert statistics.mean(tokens <= part for tokens in aimed("le", part)) >= 0.95
    assert statistics.mean(tokens >= part for tokens in aimed("ge", part)) >= 0.95
    assert statistics.mean(aimed("ge", part)) < 8 * part  # it ends once the target is reached, if not at once


def test_a_unit_has_the_tokens_that_were_measured(tmp_path: Path) -> None:
    """Beside the same length model: where a character is said to take more tokens, texts of as many characters become longer."""
    lengths = []
    for tokens in (0.05, 1.0):
        folder = shutil.copytree(MODELS / "lenvm", tmp_path / str(tokens))
        facts = json.loads((folder / "lenvm.json").read_text())
        (folder / "lenvm.json").write_text(json.dumps(facts | {"unit_tokens": {"characters": tokens}}))
        settings = EngineSettings(model=str(MODELS / "base"), name="demo", lenvm_model=str(folder), max_total_tokens=8000)
        engine, written = build_loop(settings), 0
        guidance = wire.LengthGuidance(constraint="eq", target_length=150, unit="characters")
        for place, prompt in enumerate(prompts()[:4]):
            sampling = wire.Sampling(max_tokens=LIMIT, seed=place, min_p=MIN_P)
            engine.submit(wire.Generate(f"{place}", prompt, sampling, length_guidance=guidance))
        while not engine.idle:
            written += sum(len(reply.tokens) for reply in engine.step())
        lengths.append(written)
    assert lengths[1] > 1.3 * lengths[0]
