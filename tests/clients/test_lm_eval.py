"""lm-eval's ``local-completions`` gets the same numbers from a gateway as its ``hf`` model gets from the same checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.environments import DATA, run_together
from tests.processes import Program
from yardstick_llm.engine.demo import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = MODELS / "base"
TASKS = str(DATA)


def likelihoods(evaluated: Any) -> list[list[float]]:
    """The log-likelihoods of each choice of each question, and of each text."""
    choices = [[likelihood for likelihood, _ in sample] for sample in evaluated["samples"]["choice"]]
    return [*choices, *evaluated["samples"]["rolling"]]


def greedy(evaluated: Any) -> list[list[bool]]:
    """Whether each choice of each question is what greedy decoding writes."""
    return [[flag for _, flag in sample] for sample in evaluated["samples"]["choice"]]


def test_likelihoods_and_texts_equal_those_of_transformers(demo: Program, cache: dict[str, str]) -> None:
    """With the tokenizer of the server, and with one of lm-eval's own."""
    served = ("lmeval_tasks.py", demo.url, "yardstick-demo", TASKS)
    reference, *evaluated = run_together(
        "evaluation", ("lmeval_reference.py", str(MODEL), TASKS), served, (*served, str(MODEL)), seconds=300, **cache
    )
    assert {flag for flags in greedy(reference) for flag in flags} == {True, False}
    for given in evaluated:
        assert likelihoods(given) == [pytest.approx(row, rel=1e-5, abs=1e-4) for row in likelihoods(reference)]
        assert greedy(given) == greedy(reference)
        assert given["samples"]["writing"] == reference["samples"]["writing"]
        for task, metrics in reference["results"].items():
            for name, value in metrics.items():
                expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
                assert given["results"][task][name] == expected, (task, name)
