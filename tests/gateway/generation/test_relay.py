"""Generations whose engine is lost midway go on at another, and the client does not notice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, metric
from yardstick_llm.engine import wire

UNREAD = {"prompt": "the quick brown", "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 7, "logprobs": 2}
BODY = UNREAD | {"stop": ["\N{SNOWMAN}"]}
"""Where text may end an answer, tokens come as they are drawn."""


def choices(answer: Any) -> list[tuple[int, str, list[str], list[float]]]:
    return [
        (choice["index"], choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"])
        for choice in answer.json()["choices"]
    ]


def pair(start: Start, **options: Any) -> tuple[list[FakeEngine], Any]:
    engines = [FakeEngine(**options), FakeEngine(**options)]
    return engines, start(*engines)


def answered(engines: list[FakeEngine], client: Any, body: dict[str, Any]) -> Any:
    """The choices of an answer. The engine that gave it, which prompts with the same beginning prefer, is the first one then."""
    whole = choices(client.post("/v1/completions", json=body))
    if not engines[0].generates:
        engines.reverse()
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "tokens_per_delta", "n"), [("break_after", 1, 3), ("skip_after", 7, 3)])
def test_the_answer_is_the_same(start: Start, fault: str, tokens_per_delta: int, n: int) -> None:
    engines, client = pair(start, tokens_per_delta=tokens_per_delta)
    body = {**BODY, "n": n}
    whole = answered(engines, client, body)
    for engine in engines:
        engine.generates.clear()
    setattr(engines[0].faults, fault, 4)
    while not engines[0].generates:  # replicas with nothing to do take turns
        answer = client.post("/v1/completions", json=body)
        assert choices(answer) == whole
        assert answer.json()["usage"]["completion_tokens"] == 40 * n
    resumed = [request for request in engines[1].generates if request.resume_offset]
    assert len(resumed) == n
    assert {request.index for request in resumed} == set(range(n))
    assert all(request.sampling.n == 1 for request in resumed)
    assert metric(client, 'yardstick_resumed_sequences_total{model="fake"}') == n


def test_what_nobody_reads_before_the_end_comes_in_few_pieces(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine)
    for changes in ({}, {"stop": ["x"]}, {"stream": True}):
        client.post("/v1/completions", json=UNREAD | changes).raise_for_status()
    assert [request.tokens_per_delta for request in engine.generates] == [16, 1, 1]


@pytest.mark.slow
def test_the_log_probabilities_of_a_long_prompt_are_told_once(start: Start) -> None:
    """They arrive in three messages."""
    engines, client = pair(start)
    body = {**BODY, "prompt": [7, 8, 9, 10] * 150, "max_tokens": 3, "echo": True}
    whole = answered(engines, client, body)
    assert len(whole[0][2]) == 603
    for count in (1, 2, 3):
        engines[0].generates.clear()
        engines[0].faults.break_after = count
        while not engines[0].generates:
            assert choices(client.post("/v1/completions", json=body)) == whole


def test_a_rolling_restart(start: Start) -> None:
    """Each engine is lost again and again, and comes back: as long as tokens arrive the stream goes on."""
    engines, client = pair(start)
    whole = choices(client.post("/v1/completions", json=BODY))
    for engine in engines:
        engine.faults.break_after = 3
    assert choices(client.post("/v1/completions", json=BODY)) == whole
    assert metric(client, 'yardstick_resumed_sequences_total{model="fake"}') >= 12


def test_no_progress_is_the_end(start: Start) -> None:
    engines, client = pair(start)
    engines[0].faults.break_after = engines[1].faults.break_after = 0
    answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_lost")
    assert sum(len(engine.generates) for engine in engines) == 2


def test_what_does_not_help_is_not_tried_again(start: Start) -> None:
    engines, client = pair(start)
    for engine in engines:
        engine.faults.fail = wire.Failed("", "invalid", "no")
    assert client.post("/v1/completions", json=BODY).status_code == 400
    assert sum(len(engine.generates) for engine in engines) == 1
