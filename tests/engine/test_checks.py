"""Scores that a model cannot answer, or not at once."""

from __future__ import annotations

import msgspec
import pytest

from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.checks import MAX_NUMBERS, check

LIMITS = wire.Limits(max_branches=10_000, max_slots=1 << 20, max_logprobs=20, max_labels=1000, max_sequences=8)
INFO = wire.Info("m", "f", 300, 1 << 20, [1], ["score", "generate", "embed"], LIMITS, embedding_size=64)


def problem(prefix: list[int], branches: list[list[int]], readout: wire.ScoreReadout) -> str | None:
    return check(wire.Score("s", prefix, branches, readout), INFO)


def test_dimensions_out_of_range() -> None:
    assert problem([], [[1]], wire.Embedding(dimensions=65)) == "dimensions is 65; at most 64 is allowed."


def test_a_causal_model_leaves_no_prompt_out() -> None:
    found = problem([], [[1]], wire.Embedding(prompt_tokens=1))
    assert found == "prompt_tokens needs a model whose tokens all attend to each other."


def test_a_likelihood_needs_a_prefix() -> None:
    message = problem([], [[1]], wire.Likelihood())
    assert message == "The prefix is empty; the likelihood of a branch needs at least one token before it."
    assert problem([], [], wire.Likelihood()) is None
    assert problem([1], [[1]], wire.Likelihood()) is None


@pytest.mark.parametrize(
    ("readout", "branch", "row"),
    [
        (wire.Labels([1] * 1000), [1], 1000),
        (wire.Likelihood(), [1] * 127, 128),
        (wire.Embedding(dimensions=32), [1], 32),
    ],
)
def test_the_answer_is_bounded(readout: wire.ScoreReadout, branch: list[int], row: int) -> None:
    most = MAX_NUMBERS // row
    assert problem([1], [branch] * most, readout) is None
    expected = f"The answer would have {(most + 1) * row} numbers, at most {MAX_NUMBERS} are allowed; send fewer branches."
    assert problem([1], [branch] * (most + 1), readout) == expected


def test_one_branch_is_bounded_by_the_context_alone() -> None:
    assert problem([1], [[1] * (MAX_NUMBERS + 5)], wire.Likelihood()) is None


def test_the_prefix_of_embeddings_is_not_repeated_without_end() -> None:
    branches = [[1]] * 4000
    assert problem([1] * 1000, branches, wire.Embedding()) is None
    assert "send fewer branches" in (problem([1] * 2000, branches, wire.Embedding()) or "")
    assert problem([1] * 2000, branches, wire.Labels([1])) is None


def test_the_refusal_names_what_the_model_can_do() -> None:
    guided = msgspec.structs.replace(INFO, capabilities=["score", "generate", "length_guidance"])
    message = wire.Score("s", [], [[1]], wire.Classes())
    assert check(message, guided) == "This model cannot classify; it can score and generate."
