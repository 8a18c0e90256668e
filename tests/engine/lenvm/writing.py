"""Guided generations to write, loops to write them with, and the check of what was written against plain forwards."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.checkpoints import END_OF_TURN, make_checkpoint
from tests.engine.integrity import check
from tests.engine.lenvm.plain import GAMMA, Plain, make_lenvm_checkpoint
from tests.engine.parity import some_tokens
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings

PAIRS = {
    "qwen2+qwen3": ("qwen2", {"tie_word_embeddings": True}, "qwen3", {"num_key_value_heads": 1}),
    "qwen3+llama": ("qwen3", {}, "llama", {"hidden_size": 32, "num_hidden_layers": 2}),
}


def make_pair(directory: Path, name: str) -> tuple[Path, Path]:
    base, of_base, length, of_length = PAIRS[name]
    return make_checkpoint(directory / "base", base, **of_base), make_lenvm_checkpoint(directory / "lenvm", length, **of_length)


def build_guided(checkpoints: tuple[Path, Path], form: str, **settings) -> Loop:
    base, length = map(str, checkpoints)
    defaults = {"max_total_tokens": 4096, "overlap": form == "overlapped", "lenvm_gamma": GAMMA}
    loop = build_loop(EngineSettings(model=base, name="test", lenvm_model=length, **(defaults | settings)))
    assert loop._runner._lenvm._compact == (form != "overlapped")
    return loop


def run(loop: Loop, *messages: wire.Request) -> dict[str, list[wire.Reply]]:
    """The replies of each request; slots are checked after every step."""
    for message in messages:
        loop.submit(message)
    replies: dict[str, list[wire.Reply]] = {}
    for _ in range(20_000):
        if loop.idle:
            return replies
        for reply in loop.step():
            replies.setdefault(reply.id, []).append(reply)
        check(loop._scheduler)
    raise AssertionError("the requests never ended")


def tokens_of(replies: list[wire.Reply], index: int = 0) -> list[int]:
    return [token for reply in replies if reply.index == index for token in reply.tokens]


def guided(name: str, prompt: list[int], guidance: wire.LengthGuidance, **sampling) -> wire.Generate:
    defaults = {"max_tokens": 12, "ignore_eos": True, "seed": sum(map(ord, name))}
    return wire.Generate(name, prompt, wire.Sampling(**(defaults | sampling)), logprobs=20, length_guidance=guidance)


def guidance(**settings) -> wire.LengthGuidance:
    return wire.LengthGuidance(return_values=True, **settings)


MODES = (
    {"scale": 3.0},
    {"mode": "value_bias", "scale": -0.7, "top_k": 2},
    {"mode": "mul", "scale": 0.8, "gamma": 0.99},
    {"mode": "length_mul", "scale": 2.0, "top_k": 9},
    {"constraint": "eq", "target_length": 6, "gamma": 0.95},
    {"constraint": "le", "target_length": 4},
    {"constraint": "ge", "target_length": 4, "top_k": 3},
    {"scale": 4.0, "entropy_threshold": 1.3},
    {"scale": -4.0, "value_min": 0.5},
    {"constraint": "within", "target_length": 14},
    {"constraint": "about", "target_length": 9, "end_min_p": 0.01},
)


def some_messages(rng: random.Random, low: int = 1, high: int = 40) -> list[wire.Generate]:
    """One a mode, with filters that leave one candidate now and then."""
    filters = ({}, {"top_p": 0.4}, {"min_p": 0.4}, {"temperature": 0.5, "min_p": 0.6}, {"logit_bias": {END_OF_TURN: 4.0}})
    return [
        guided(f"g{place}", some_tokens(rng, low, high), guidance(**mode), **filters[place % len(filters)])
        for place, mode in enumerate(MODES)
    ]


def verify(plain: Plain, message: wire.Generate, deltas: list[wire.Delta]) -> int:
    """Every draw: its candidates, values, probabilities, and that the token can have been drawn. Returns how many were guided."""
    text, asked = list(message.prompt), 0
    drawn = message.resume_offset
    for delta in deltas:
        expected = plain.draw(text, drawn, message)
        (token,), (ids,), (top,), (values,) = delta.tokens, delta.logprobs.top_tokens, delta.logprobs.top, delta.logprobs.values
        tilted = dict(zip(expected.ids, expected.tilted.tolist(), strict=True))
        assert sorted(ids) == sorted(tilted)  # those of probability 0 too, for their values
        assert top == sorted(top, reverse=True)
        found = dict(zip(ids, top, strict=True))
        assert [math.exp(p) for p in top] == pytest.approx([tilted[candidate] for candidate in ids], abs=2e-5)
        assert delta.logprobs.chosen == [found[token]]
        if values[0] is not None:
            asked += 1
            v = dict(zip(expected.ids, expected.v.tolist(), strict=True))
            assert values == pytest.approx([v[candidate] for candidate in ids], abs=1e-5)
        text.append(token)
        drawn += 1
    assert drawn > message.resume_offset
    return asked
