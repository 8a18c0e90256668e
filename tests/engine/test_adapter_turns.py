"""Turns of adapters where requests name more than a step may have: every adapter is served, and none is swapped too often."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from engine.scheduling import adapter_turns
from engine.scheduling.adapter_turns import TURN, AdapterTurns


def request(digest: str | None) -> Any:
    return SimpleNamespace(adapter=None if digest is None else SimpleNamespace(digest=digest))


def step(turns: AdapterTurns, digests: str) -> str:
    """Begin a step with a request for each adapter, named by a letter; return those that it takes."""
    requests = [request(digest) for digest in digests]
    turns.begin(requests)
    return "".join(digest for digest, each in zip(digests, requests, strict=True) if turns.takes(each))


def test_an_engine_without_adapters_takes_requests_without_one() -> None:
    turns = AdapterTurns()
    turns.begin([request(None)])
    assert turns.takes(request(None))


def test_up_to_the_limit_nothing_is_restricted() -> None:
    turns = AdapterTurns(3)
    for _ in range(3 * TURN):
        assert step(turns, "abc") == "abc"
    turns.begin([request("a")])
    assert [turns.takes(request(digest)) for digest in "abcd"] == [True, True, True, False], "later requests take what is left"
    assert turns.takes(request(None))
    turns.begin([request("d")])
    assert turns.takes(request("d")), "each step begins anew"


def test_adapters_take_turns_of_some_steps() -> None:
    turns = AdapterTurns(2)
    taken = [step(turns, "abcde") for _ in range(50 * TURN)]
    assert taken[:TURN] == ["ab"] * TURN
    assert taken[TURN : 2 * TURN] == ["cd"] * TURN
    assert taken[2 * TURN : 3 * TURN] == ["ae"] * TURN, "the one that never had a turn comes before the one whose turn ended first"
    for digest in "abcde":
        assert sum(digest in each for each in taken) == 20 * TURN, "as many steps for each"


def test_requests_without_an_adapter_never_wait() -> None:
    turns = AdapterTurns(1)
    for _ in range(3 * TURN):
        turns.begin([request("a"), request("b"), request(None)])
        assert turns.takes(request(None))


def test_an_adapter_without_requests_gives_up_its_turn() -> None:
    turns = AdapterTurns(2)
    assert step(turns, "abc") == "ab"
    assert step(turns, "bcd") == "bc", "b goes on, c has waited"
    for _ in range(TURN - 2):
        assert step(turns, "bcd") == "bc"
    assert step(turns, "bcd") == "cd"
    assert step(turns, "cd") == "cd"
    assert step(turns, "ecd") == "ed", "turns go on through a step without a restriction"


def test_a_request_that_comes_within_the_step_waits_for_a_turn() -> None:
    turns = AdapterTurns(2)
    assert step(turns, "abc") == "ab"
    assert not turns.takes(request("new"))
    assert turns.takes(request("a")), "another request for an adapter in turn"


@pytest.mark.parametrize("seed", range(20))
def test_every_adapter_is_served_after_a_bounded_number_of_steps(seed: int) -> None:
    """Requests come and go at random; at least one is always there for each of the adapters that are watched."""
    rng = random.Random(seed)
    most, count = rng.randint(1, 4), rng.randint(2, 12)
    names = "abcdefghijkl"[:count]
    turns, waited = AdapterTurns(most), dict.fromkeys(names, 0)
    watched = set(rng.sample(names, rng.randint(1, count)))
    for _ in range(1000):
        wanted = [name for name in names if name in watched or rng.random() < 0.4]
        rng.shuffle(wanted)
        taken = step(turns, "".join(wanted))
        assert len(taken) <= most
        assert len(taken) == min(most, len(wanted)), "no place is left empty"
        for name in names:
            waited[name] = 0 if name in taken or name not in wanted else waited[name] + 1
            assert waited[name] <= TURN * -(-count // most)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_turns, "REMEMBERED", 5)
    turns = AdapterTurns(1)
    for number in range(100):
        turns.begin([request(f"{number}"), request(f"{number + 1}")])
    assert len(turns._ended) <= 5
