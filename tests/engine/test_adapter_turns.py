"""Turns of adapters where requests name more than a step may have: every adapter is served, and none is swapped too often."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from engine.scheduling.allocation import TURN, AdapterTurns


def request(digest: str | None) -> Any:
    return SimpleNamespace(adapter=None if digest is None else SimpleNamespace(digest=digest))


def step(turns: AdapterTurns, digests: str) -> str:
    """Begin a step with a request for each adapter, named by a letter; return those that it takes."""
    requests = [request(digest) for digest in digests]
    turns.begin(requests)
    return "".join(digest for digest, each in zip(digests, requests, strict=True) if turns.takes(each))


def test_adapters_take_turns_of_some_steps() -> None:
    turns = AdapterTurns(2)
    taken = [step(turns, "abcde") for _ in range(50 * TURN)]
    assert taken[:TURN] == ["ab"] * TURN
    assert taken[TURN : 2 * TURN] == ["cd"] * TURN
    assert taken[2 * TURN : 3 * TURN] == ["ae"] * TURN, "the one that never had a turn comes before the one whose turn ended first"
    for digest in "abcde":
        assert sum(digest in each for each in taken) == 20 * TURN, "as many steps for each"


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
