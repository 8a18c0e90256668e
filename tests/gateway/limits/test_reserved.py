"""A request that is charged in two steps, before and after a text worker reads it, is charged as in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gateway.limits.test_shared_limits import limiter
from tests.redis import RedisServer
from yardstick_llm.gateway.api.access import Quotas
from yardstick_llm.gateway.errors import Overloaded, RateLimited
from yardstick_llm.gateway.http.context import RequestContext
from yardstick_llm.gateway.keys import ApiKey
from yardstick_llm.gateway.limits.limiter import LocalLimiter
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.schemas.common import new_id

LIMITS = {"requests_per_minute": 10, "tokens_per_minute": 1000, "items_per_minute": 100, "concurrency": 2}


@pytest.fixture(params=["memory", "redis"])
async def quotas(request: pytest.FixtureRequest) -> AsyncIterator[Quotas]:
    if request.param == "memory":
        yield Quotas(LocalLimiter(), Telemetry())
        return
    with RedisServer.start() as server:
        async with limiter(server.url) as shared:
            yield Quotas(shared, Telemetry())


class Asking:
    """A request of one key."""

    def __init__(self, name: str = "a", **limits: int) -> None:
        key = ApiKey(name, sha256=name.encode().hex().ljust(64, "0"), **(limits or LIMITS))
        self.context = RequestContext(new_id().encode(), key=key)
        self.connection: Any = SimpleNamespace(scope={"yardstick.context": self.context})

    def end(self, status: int) -> None:
        self.context.status = status
        for call in self.context.at_end:
            call()

    @property
    def left(self) -> tuple[int, ...]:
        """Requests, tokens and items that the newest headers say are left."""
        headers = dict(self.context.headers)
        return tuple(int(headers[f"x-ratelimit-remaining-{name}".encode()]) for name in ("requests", "tokens", "items"))


async def left(quotas: Quotas) -> tuple[int, ...]:
    """What is left of the key ``a``, however many of its requests are in progress."""
    asking = Asking(**{name: limit for name, limit in LIMITS.items() if name != "concurrency"})
    await quotas.charge(asking.connection, tokens=0)
    asking.end(500)
    requests, tokens, items = asking.left
    return requests + 1, tokens, items


def near(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether nothing but what comes back with time is more."""
    return all(0 <= more - less <= limit // 20 for more, less, limit in zip(found, expected, (20, 1000, 100), strict=True))


async def reserved(quotas: Quotas) -> None:
    """Reserve as soon as the places of requests that have ended are free."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await quotas.reserve(Asking().connection, tokens=1, items=0)
            except RateLimited:
                await asyncio.sleep(0.01)


async def settled(quotas: Quotas, *expected: int) -> None:
    """Redis gets the refund in the background."""
    for _ in range(200):
        if near(found := await left(quotas), expected):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{found} are left, not {expected}")


async def test_an_answer_costs_what_it_costs_in_one_step(quotas: Quotas) -> None:
    asking = Asking()
    await quotas.reserve(asking.connection, tokens=3, items=1)
    assert near(asking.left, (9, 997, 99))
    lease = await quotas.charge(asking.connection, tokens=400, items=20)
    assert lease is not None
    assert tuple(lease.cost) == (1, 400, 20)
    assert near(asking.left, (9, 600, 80))
    assert len(asking.context.headers) == 9, "the newer state replaces the older one"
    lease.used_tokens = 300
    asking.end(200)
    await settled(quotas, 9, 700, 80)


@pytest.mark.parametrize(("status", "requests"), [(400, 9), (404, 9), (429, 9), (499, 9), (500, 10), (503, 10)])
@pytest.mark.parametrize("fetches", [False, True])
async def test_a_refusal_is_one_request(quotas: Quotas, status: int, requests: int, fetches: bool) -> None:
    asking = Asking()
    await quotas.reserve(asking.connection, tokens=3, items=1, fetches=fetches)
    asking.end(status)
    await settled(quotas, 9 if fetches else requests, 1000, 100)


async def test_an_overload_after_reading_costs_nothing(quotas: Quotas) -> None:
    asking = Asking()
    await quotas.reserve(asking.connection)
    asking.context.failed(Overloaded("full", retry_after=1))
    asking.end(429)
    await settled(quotas, 10, 1000, 100)


async def test_what_does_not_fit_later_takes_nothing_more(quotas: Quotas) -> None:
    asking = Asking()
    await quotas.reserve(asking.connection, tokens=3, items=1)
    with pytest.raises(RateLimited, match=r"this request needs 1001\. Send a smaller request"):
        await quotas.charge(asking.connection, tokens=1001, items=1)
    asking.end(429)
    await settled(quotas, 9, 1000, 100)
    other = Asking()
    await quotas.charge(other.connection, tokens=600)
    asking = Asking()
    await quotas.reserve(asking.connection, tokens=3, items=1)
    with pytest.raises(RateLimited, match="less than this request's 500 are left"):
        await quotas.charge(asking.connection, tokens=500, items=1)
    asking.end(429)
    other.end(200)
    await settled(quotas, 7, 400, 100)


async def test_a_reservation_has_one_place_among_those_in_progress(quotas: Quotas) -> None:
    both = [Asking(), Asking()]
    for asking in both:
        await quotas.reserve(asking.connection, tokens=1, items=0)
        await quotas.charge(asking.connection, tokens=10)
    with pytest.raises(RateLimited, match="2 requests in progress"):
        await quotas.reserve(Asking().connection, tokens=1, items=0)
    for asking in both:
        asking.end(200)
    for _ in range(2):
        await reserved(quotas)
    await settled(quotas, 6, 978, 100)


async def test_without_limits_nothing_is_reserved(quotas: Quotas) -> None:
    asking = Asking(weight=1)
    await quotas.reserve(asking.connection, tokens=3, items=1)
    assert (await quotas.charge(asking.connection, tokens=400), asking.context.at_end) == (None, [])
