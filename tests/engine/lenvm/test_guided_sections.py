"""Length guidance of the thinking section or of the answer alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from tests.checkpoints import END_OF_TURN
from tests.engine.lenvm.plain import Draw, Plain
from tests.engine.lenvm.writing import build_guided, guidance, run, tokens_of
from tests.engine.parity import some_tokens
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop

Build = Callable[..., Loop]
TIGHT = {"max_total_tokens": 128, "max_batched_tokens": 24}


@pytest.fixture
def build(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Build:
    """Builds the form that computes candidates ahead, unless a test asks for the compact one."""
    return partial(build_guided, checkpoints, getattr(request, "param", "overlapped"))


OPEN, CLOSE = 11, 17
THINKING = {"opened": wire.Thinking(CLOSE), "opens": wire.Thinking(CLOSE, OPEN)}


def sections(output: list[int], thinking: wire.Thinking) -> list[str]:
    """The section of each draw, by its definition; the first of an output that may think is in neither."""
    if thinking.open is not None and output[0] != thinking.open:
        return ["", *["answer"] * (len(output) - 1)]
    end = output.index(CLOSE) + 1 if CLOSE in output else len(output)
    first = [] if thinking.open is None else [""]
    return [*first, *["thinking"] * (end - len(first)), *["answer"] * (len(output) - end)]


@pytest.mark.slow
@pytest.mark.parametrize("applies_to", ["thinking", "answer"])
@pytest.mark.parametrize(
    ("build", "settings", "prompt"),
    [("compact", {}, "opened"), ("overlapped", TIGHT, "opens")],
    indirect=["build"],
)
def test_only_the_draws_of_one_section_are_guided(build: Build, plain: Plain, applies_to, prompt: str, settings):
    """The others are those of the request without guidance. Closing the section is made as probable as it takes."""
    asked, unguided = 0, build()
    for seed, bias in ((1, {CLOSE: 6.0, OPEN: 6.0}), (3, {OPEN: 30.0, CLOSE: 25.0})):
        sampling = wire.Sampling(max_tokens=12, seed=seed, ignore_eos=True, logit_bias=bias)
        guide = guidance(scale=4.0, applies_to=applies_to, thinking=THINKING[prompt])
        message = wire.Generate("g", some_tokens(random.Random(seed), 8, 8), sampling, logprobs=20, length_guidance=guide)
        loop = build(**settings)
        replies = run(loop, message)["g"]
        output = tokens_of(replies)
        where = sections(output, THINKING[prompt])
        for place, (delta, section) in enumerate(zip(replies, where, strict=True)):
            text = [*message.prompt, *output[:place]]
            (values,) = delta.logprobs.values
            if section == applies_to:
                draw = plain.draw(text, place, message)
                assert set(delta.logprobs.top_tokens[0]) <= set(draw.ids)
                told = dict(zip(delta.logprobs.top_tokens[0], delta.logprobs.top[0], strict=True))
                ends = [rank for rank, token in enumerate(draw.ids) if token == CLOSE and applies_to == "thinking"]
                tilted = centered(draw, ends, 4.0)
                for token, logprob in told.items():
                    assert math.exp(logprob) == pytest.approx(float(tilted[draw.ids.index(token)]), abs=2e-4)
            else:
                assert values == [None] * 20
                one = msgspec.structs.replace(sampling, max_tokens=place + 1)
                free = wire.Generate("f", text, one, logprobs=20, resume_offset=place)
                again = run(unguided, free)["f"][0]
                assert again.tokens == output[place : place + 1]
                assert again.logprobs.top[0] == pytest.approx(delta.logprobs.top[0], abs=1e-4)
        asked += loop.stats.guided_draws
        assert loop.stats.guided_draws == where.count(applies_to)
    assert asked


def centered(draw: Draw, ends: list[int], scale: float) -> torch.Tensor:
    """The tilt of the mode centered_exp, where the candidates ``ends`` end the section."""
    v = draw.v.clone()
    v[ends] = 0.0
    weights = draw.prior * (scale * v).exp()
    return weights / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", THINKING)
@pytest.mark.parametrize("applies_to", ["thinking", "answer"])
def test_a_target_counts_the_tokens_of_its_section(build: Build, prompt: str, applies_to) -> None:
    """The section is as long as the target, because its end is always a candidate."""
    thinks = applies_to == "thinking" or prompt == "opened"  # otherwise the first token is not the opening tag, and all is answer
    before = [OPEN] if prompt == "opens" and thinks else [CLOSE] if applies_to == "answer" and thinks else []
    end = {"thinking": CLOSE, "answer": END_OF_TURN}[applies_to]
    bias = {"thinking": {CLOSE: 14.0, OPEN: 60.0}, "answer": {CLOSE: 30.0, END_OF_TURN: 25.0}}[applies_to]
    aim = {"constraint": "ge", "target_length": 6, "top_k": 20}
    guide = wire.LengthGuidance(**aim, applies_to=applies_to, thinking=THINKING[prompt])
    sampling = wire.Sampling(max_tokens=20, seed=4, logit_bias=bias)
    output = tokens_of(run(build(), wire.Generate("g", [5, 6, 7], sampling, length_guidance=guide))["g"])
    assert output[: len(before)] == before
    assert output.index(end, len(before)) - len(before) == 6


@pytest.mark.slow
def test_a_resumed_generation_knows_its_section(build: Build):
    sampling = wire.Sampling(max_tokens=20, seed=5, ignore_eos=True, logit_bias={CLOSE: 6.0})
    guide = wire.LengthGuidance(scale=4.0, applies_to="answer", thinking=wire.Thinking(CLOSE))
    message = wire.Generate("g", [9, 8, 7], sampling, length_guidance=guide)
    whole = tokens_of(run(build(), message)["g"])
    assert CLOSE in whole[:15]
    for done in (1, whole.index(CLOSE), whole.index(CLOSE) + 1, 15):
        rest = msgspec.structs.replace(message, prompt=[9, 8, 7, *whole[:done]], resume_offset=done)
        assert tokens_of(run(build(), rest)["g"]) == whole[done:]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", THINKING)
@pytest.mark.parametrize("applies_to", ["both", "thinking", "answer"])
def test_a_limit_ends_a_section_that_is_guided_or_not(build: Build, prompt: str, applies_to) -> None:
    thinking = THINKING[prompt]
    guide = guidance(scale=3.0, applies_to=applies_to, thinking=None if applies_to == "both" else thinking)
    bias = {CLOSE: -80.0} | ({OPEN: 80.0} if prompt == "opens" else {})
    sampling = wire.Sampling(max_tokens=14, seed=4, ignore_eos=True, logit_bias=bias)
    free = wire.Generate("free", [5, 6, 7], sampling, logprobs=3, length_guidance=guide)
    cut = msgspec.structs.replace(free, id="cut", thinking_limit=wire.ThinkingLimit(thinking, 5))
    loop = build(**TIGHT)
    told = run(loop, free) | run(loop, cut)
    place = 5 + (prompt == "opens")
    before, after = tokens_of(told["free"]), tokens_of(told["cut"])
    assert (after[:place], after[place], len(after)) == (before[:place], CLOSE, 14)
    (values,) = [reply.logprobs.values[0] for reply in told["cut"] if reply.tokens == [CLOSE] and reply.logprobs]
    assert values == [None] * 3  # no length model took part
