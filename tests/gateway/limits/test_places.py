"""Places that tenants wait for."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.limits.places import FairPlaces
from gateway.process.fair_room import Tenant

A, B, C = Tenant("a"), Tenant("b"), Tenant("c")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_that_takes_all_it_may_leaves_places_for_others() -> None:
    places = FairPlaces(10)
    greedy = [asyncio.create_task(places.take(A)) for _ in range(50)]
    await settle()
    assert (sum(task.done() for task in greedy), places.used) == (8, 8)
    for _ in range(2):
        await asyncio.wait_for(places.take(B), 5)
    places.give(A)
    await settle()
    assert sum(task.done() for task in greedy) == 8, "with another busy tenant it may have less"
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_tenants_that_wait_take_turns() -> None:
    places, order = FairPlaces(1), []
    everyone = Tenant()
    await places.take(everyone)

    async def wait(tenant: Tenant) -> None:
        await places.take(tenant)
        order.append(tenant.id)
        places.give(tenant)

    tasks = [asyncio.create_task(wait(tenant)) for tenant in (A, A, A, A, B, C, B)]
    await settle()
    places.give(everyone)
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order == ["a", "b", "c", "a", "b", "a", "a"]
    assert places.used == 0


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost_or_given_twice(seed: int) -> None:
    """Tasks are cancelled at any time, also when they have just got a place."""
    chance, places, running = random.Random(seed), FairPlaces(5), 0

    async def use(tenant: Tenant) -> None:
        nonlocal running
        await places.take(tenant)
        running += 1
        assert running <= 5
        try:
            await asyncio.sleep(0)
        finally:
            running -= 1
            places.give(tenant)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(use(chance.choice([A, B, C, Tenant(), Tenant("d", 4.0)]))))
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert (places.used, places._waiting) == (0, {})
