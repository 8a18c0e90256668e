"""The room that keys share."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yardstick_llm.gateway.process.bounds import ALPHA, FairRoom

steps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.booleans()), max_size=200)


@given(st.integers(1, 1000), steps)
def test_whatever_is_taken_and_given_the_thresholds_hold(capacity: int, steps: list[tuple[str, int, bool]]) -> None:
    room = FairRoom(capacity)
    held: dict[str, list[int]] = {}
    for tenant, amount, gives in steps:
        free = capacity - sum(map(sum, held.values()))
        mine = held.setdefault(tenant, [])
        if gives and mine:
            room.give(tenant, mine.pop())
        elif not gives:
            allowed = amount <= free and sum(mine) + amount <= ALPHA * free
            assert room.take(tenant, amount) == allowed
            if allowed:
                mine.append(amount)
        assert room.used == sum(map(sum, held.values())) <= capacity
    for tenant, amounts in held.items():
        for amount in amounts:
            room.give(tenant, amount)
    assert (room.used, room._held) == (0, {}), "nothing is kept of tenants that are gone"


@given(st.integers(10, 2000), st.integers(1, 5))
def test_busy_tenants_get_equal_shares_and_leave_room_for_one_more(capacity: int, tenants: int) -> None:
    """The shares of the paper: alpha / (1 + alpha n) for each of n, up to rounding."""
    room = FairRoom(capacity)
    shares = dict.fromkeys(map(str, range(tenants)), 0)
    progress = True
    while progress:
        progress = False
        for tenant in shares:
            if room.take(tenant):
                shares[tenant] += 1
                progress = True
    ideal = Fraction(capacity * int(ALPHA), 1 + int(ALPHA) * tenants)
    assert all(abs(share - ideal) <= 2 for share in shares.values())
    if capacity - room.used:
        assert room.take("newcomer"), "where there is room, a newcomer gets it"


def test_a_tenant_without_a_name_may_use_everything() -> None:
    room = FairRoom(10)
    assert all(room.take(None) for _ in range(10))
    assert not room.take(None)
    room.give(None, 10)
    assert room.used == 0


def test_the_largest_weight_leaves_room_for_others() -> None:
    room = FairRoom(170)
    while room.take("heavy", weight=100):
        pass
    assert 158 <= room.used <= 160  # 16/17
    assert room.take("light", weight=0.1)


@pytest.mark.parametrize(("tenant", "weight", "most"), [(None, 1.0, 100), ("a", 1.0, 100), ("a", 0.1, 40), ("a", 0.25, 100)])
def test_the_most_that_a_tenant_may_hold(tenant: str | None, weight: float, most: int) -> None:
    assert FairRoom(100).most(tenant, weight) == most
    assert not FairRoom(100).take(tenant, most + 1, weight)
    assert FairRoom(100).take(tenant, most, weight)
