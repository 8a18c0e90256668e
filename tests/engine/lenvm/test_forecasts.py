"""Forecasts of lengths before generations begin, and their order: the demo models and the engine's own loop."""

from __future__ import annotations

import math
from functools import cache
from random import Random
from statistics import mean
from typing import NamedTuple

import msgspec
import pytest

from examples.demo_models.corpus.documents import draw_request
from examples.demo_models.text import load_tokenizer
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import AGING_PER_TOKEN, Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.requests.generation import expected_tokens
from yardstick_llm.engine.settings import EngineSettings

BEGINNINGS = ("A review in eleven parts. Part one:", "A note in one line. First,")
"""Plans that begin answers of the demo model. The plan decides how long the text becomes."""


@cache
def prompts() -> list[list[int]]:
    rng, tokenizer = Random(5), load_tokenizer(MODELS / "base")
    return [tokenizer.encode(draw_request(rng, held_out=True)[0] + BEGINNINGS[place % 2]).ids for place in range(12)]


def loop(forecast: str) -> Loop:
    """With ``report``, steps overlap."""
    models = {"model": str(MODELS / "base"), "lenvm_model": str(MODELS / "lenvm")}
    settings = EngineSettings(**models, name="demo", max_total_tokens=8000, max_running_requests=2, forecast=forecast)
    return build_loop(msgspec.structs.replace(settings, overlap=forecast == "report"))


class Run(NamedTuple):
    """What a loop did with :func:`prompts`, all of which wait from the beginning."""

    texts: dict[str, list[int]]
    steps: dict[str, int]
    """At the end of each text."""
    expected: dict[str, float]


@cache
def run(forecast: str, first_received: float = 0.0) -> Run:
    """first_received: when the first one came, a long one. All others came at 0."""
    engine, step, found = loop(forecast), 0, Run({}, {}, {})
    for place, prompt in enumerate(prompts()):
        message = wire.Generate(str(place), prompt, wire.Sampling(max_tokens=200, seed=place))
        engine.submit(message, 0.0 if place else first_received)
    while not engine.idle:
        step += 1
        for reply in engine.step():
            assert isinstance(reply, wire.Delta), reply
            found.texts.setdefault(reply.id, []).extend(reply.tokens)
            if reply.expected_tokens:
                found.expected[reply.id] = reply.expected_tokens
            if reply.finish:
                found.steps[reply.id] = step
    return found


@pytest.mark.slow
def test_shortest_first_lowers_the_mean_latency_at_the_same_throughput() -> None:
    """The texts are those without forecasts, and forecasts tell long ones from short ones."""
    plain, told, shortest = (run(forecast) for forecast in ("none", "report", "shortest-first"))
    assert plain.texts == told.texts == shortest.texts
    assert plain.expected == {}
    assert told.expected == pytest.approx(shortest.expected, rel=1e-3)
    for name, expected in told.expected.items():
        assert (expected > 50) == (len(told.texts[name]) > 50), (expected, len(told.texts[name]))
    steps = [max(each.steps.values()) for each in (plain, told, shortest)]
    assert max(steps) < 1.1 * min(steps)
    assert mean(shortest.steps.values()) < 0.8 * mean(plain.steps.values())
    assert mean(told.steps.values()) == pytest.approx(mean(plain.steps.values()), rel=0.05)


@pytest.mark.slow
def test_a_long_generation_that_came_earlier_is_not_overtaken_for_ever() -> None:
    """It begins at once if it came so much earlier that this outweighs its length, and otherwise after all short ones."""
    early, late = run("shortest-first", -400 * AGING_PER_TOKEN), run("shortest-first")
    length = len(early.texts["0"])
    assert early.steps["0"] < length + 10
    assert late.steps["0"] > length + 30


def test_a_forecast_keeps_to_what_is_asked_for() -> None:
    calibration = wire.Calibration([0.5], {"0.5": [math.log(2), math.log(3)]}, 100)

    def forecast(z: float, calibration: wire.Calibration | None = None, guidance: wire.LengthGuidance | None = None) -> float:
        message = wire.Generate("g", [1], wire.Sampling(max_tokens=500), length_guidance=guidance)
        return expected_tokens(message, z, 0.99, calibration)

    assert forecast(0.0) == pytest.approx(math.log(0.5) / math.log(0.99))
    assert forecast(-1.0, calibration) == pytest.approx(2 * forecast(-1.0))
    assert forecast(0.0, calibration) == pytest.approx(3 * forecast(0.0))
    assert (forecast(100.0), forecast(-100.0), forecast(math.nan)) == (500, 1, 0)
    for constraint, expected in (("eq", 21), ("le", 21), ("ge", forecast(0.0)), ("within", 21), ("about", 21), ("eq_soft", 21)):
        assert forecast(0.0, None, wire.LengthGuidance(constraint=constraint, target_length=20)) == pytest.approx(expected)
    sentences = wire.LengthGuidance(constraint="eq", target_length=2, unit="sentences")
    assert forecast(0.0, None, sentences) == forecast(0.0)


@pytest.mark.slow
def test_aborted_and_expired_generations_leave_no_forecast() -> None:
    engine = loop("report")
    for place, prompt in enumerate(prompts()[:3]):
        engine.submit(wire.Generate(str(place), prompt, deadline=None if place else 0.0), received=0.0)
    engine.submit(wire.Abort("1"))
    replies = [engine.step()]
    while not engine.idle:
        replies.append(engine.step())
    ends = [(reply.id, getattr(reply, "code", None) or reply.finish) for step in replies for reply in step]
    assert sorted(end for end in ends if end[1]) == [("0", "deadline"), ("1", "abort"), ("2", "length")]
    assert engine.stats.running == engine.stats.waiting == 0


def test_forecasts_need_a_length_model() -> None:
    with pytest.raises(ModelError, match="--lenvm-model"):
        build_loop(EngineSettings(model=str(MODELS / "base"), name="demo", max_total_tokens=256, forecast="report"))
