"""Limits that gateways share through a real Redis, and what becomes of them without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, closed, metric
from tests.gateway.keys import ask, entry, write
from tests.processes import until
from tests.redis import RedisServer, cluster
from yardstick_llm.gateway.limits.limiter import Cost, Lease, Limits, LocalLimiter, SharedLimiter
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.settings import Settings
from yardstick_llm.gateway.store.link import Link, open_client


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer.start() as running:
        yield running


@asynccontextmanager
async def limiter(url: str, *, lease_seconds: float = 60, renews: bool = True) -> AsyncIterator[SharedLimiter]:
    """A gateway's limiter, connected; ``renews`` False: of one that died."""
    telemetry = Telemetry()
    link = Link(open_client(Settings(engines=("http://x",), redis_url=url)), telemetry, seconds=1)
    shared = SharedLimiter(link, telemetry, prefix="test", lease_seconds=lease_seconds)
    await closed(link)
    if renews:
        shared.start()
    yield shared
    if renews:
        await shared.stop()
    await link.stop()


def lease(id: str, *, owner: str = "a", tokens: int = 0, limits: Limits) -> Lease:
    return Lease(owner, id, limits, Cost(1, tokens, 0))


async def no_place_is_held(server: RedisServer) -> None:
    with server.client() as redis:
        await until(lambda: not redis.zrange("test:limit:{a}:leases", 0, -1))


def test_gateways_count_together(start: Start, server: RedisServer, tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry("a", requests_per_minute=10))
    clients = [start(FakeEngine(), api_keys_file=file, redis_url=server.url, redis_seconds=2.0) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda place: ask(clients[place % 2], "a"), range(40))]
    assert statuses.count(200) == 10
    assert statuses.count(429) == 30
    assert metric(clients[0], "yardstick_redis_errors_total") == 0


def test_without_redis_each_goes_on_from_what_it_let_through(start: Start, server: RedisServer, tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry("a", requests_per_minute=10))
    client = start(FakeEngine(), api_keys_file=file, redis_url=server.url, redis_seconds=2.0)
    assert [ask(client, "a").status_code for _ in range(6)] == [200] * 6
    server.kill()
    statuses = [ask(client, "a").status_code for _ in range(6)]
    assert statuses == [200] * 4 + [429] * 2
    assert metric(client, "yardstick_redis_available") == 0


async def test_redis_decides_as_this_process_would(server: RedisServer) -> None:
    limits = Limits((100, 1000, None))
    local = LocalLimiter()
    async with limiter(server.url) as shared:
        for place, tokens in enumerate([1, 400, 100, 600, 499, 2000, 1, 0]):
            ours = await shared.take(lease(str(place), tokens=tokens, limits=limits))
            theirs = await local.take(lease(str(place), tokens=tokens, limits=limits))
            assert ours.denied == theirs.denied
            assert ours.wait == pytest.approx(theirs.wait, abs=0.5)
            for one, other in zip(ours.levels, theirs.levels, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.remaining == pytest.approx(other.remaining, abs=8)
                    assert one.reset == pytest.approx(other.reset, abs=0.5)


async def test_places_are_shared_and_given_back(server: RedisServer) -> None:
    limits = Limits(concurrency=2)
    async with limiter(server.url) as first, limiter(server.url) as second:
        leases = [lease(str(place), limits=limits) for place in range(3)]
        assert (await first.take(leases[0])).denied is None
        assert (await second.take(leases[1])).denied is None
        assert (await first.take(leases[2])).denied == "concurrency"
        assert (await first.take(lease("4", owner="b", limits=limits))).denied is None
        second.end(leases[1])
        await asyncio.sleep(0.2)
        assert (await first.take(leases[2])).denied is None


async def test_a_request_that_is_given_up_while_redis_decides_holds_no_place(server: RedisServer) -> None:
    """A time limit of the client may pass at any moment: before the call, when Redis has decided, or after its answer."""
    limits = Limits(concurrency=100)
    async with limiter(server.url) as shared:
        given_up = 0
        for turns in range(40):
            taken = lease(str(turns), limits=limits)
            taking = asyncio.create_task(shared.take(taken))
            for _ in range(turns):
                await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait([taking])
            if taking.cancelled():
                given_up += 1
            else:
                shared.end(taken)
        assert given_up > 5
        await no_place_is_held(server)


async def test_a_redis_that_pauses_loses_no_place(server: RedisServer) -> None:
    """Settlements fail in the pause, and Redis later grants a lease whose request has been refused. Both places become free."""
    limits = Limits(concurrency=2)
    async with limiter(server.url) as shared:
        leases = [lease(str(place), limits=limits) for place in range(2)]
        for taken in leases:
            assert (await shared.take(taken)).denied is None
        server.pause()
        try:
            refused = await shared.take(lease("refused here", limits=limits))
            for taken in leases:
                shared.end(taken)
            await asyncio.sleep(1.3)  # longer than a settlement may take
        finally:
            server.resume()
        assert refused.denied == "concurrency"
        await no_place_is_held(server)
        await asyncio.sleep(0.6)
        assert shared._ended == {}
        assert not shared._any_ended.is_set()


async def test_what_is_left_of_a_lease_expires_here_too(server: RedisServer) -> None:
    async with limiter(server.url, lease_seconds=0.5) as shared:
        taken = lease("1", limits=Limits(concurrency=1))
        assert (await shared.take(taken)).denied is None
        server.kill()
        shared.end(taken)
        await asyncio.sleep(1.2)
        assert shared._ended == {}


@pytest.mark.slow
async def test_a_gateway_that_dies_holds_its_places_only_so_long(server: RedisServer) -> None:
    limits = Limits(concurrency=1)
    async with limiter(server.url, lease_seconds=0.6, renews=False) as dead, limiter(server.url, lease_seconds=0.6) as alive:
        assert (await dead.take(lease("1", limits=limits))).denied is None
        assert (await alive.take(lease("2", limits=limits))).denied == "concurrency"
        await asyncio.sleep(0.7)
        mine = lease("3", limits=limits)
        assert (await alive.take(mine)).denied is None
        await asyncio.sleep(1.5)
        assert (await dead.take(lease("4", limits=limits))).denied == "concurrency", "the living renew theirs"
        alive.end(mine)
        await asyncio.sleep(0.2)
        assert (await dead.take(lease("5", limits=limits))).denied is None


async def test_a_redis_that_forgets_learns_again(server: RedisServer) -> None:
    limits = Limits(concurrency=1)
    async with limiter(server.url, lease_seconds=0.6) as first, limiter(server.url) as second:
        assert (await first.take(lease("1", limits=limits))).denied is None
        with server.client() as redis:
            redis.flushall()
            redis.script_flush()
        await asyncio.sleep(0.4)
        assert (await second.take(lease("2", limits=limits))).denied == "concurrency"


async def test_a_clock_that_is_set_back_refuses_nobody_for_longer(server: RedisServer) -> None:
    """Entries as they are found after the clock of Redis was set back by an hour."""
    limits = Limits((6000, 600_000, None), concurrency=1)
    async with limiter(server.url) as shared:
        with server.client() as redis:
            seconds, microseconds = redis.time()
            later = seconds * 1_000_000 + microseconds + 3600 * 1_000_000
            redis.set("test:limit:{a}:requests", f"{later + 59_900_000} {later}")
            redis.set("test:limit:{a}:tokens", f"{later + 30_000_000} {later}")
            redis.zadd("test:limit:{a}:leases", {"of a gateway that died": later + 60_000_000})
            verdict = await shared.take(lease("1", tokens=400_000, limits=limits))
            assert (verdict.denied, verdict.wait) == ("tokens", pytest.approx(10, abs=1))
            granted = lease("2", tokens=1000, limits=limits)
            verdict = await shared.take(granted)
            assert verdict.denied is None
            assert [round(level.reset) for level in verdict.levels if level] == [60, 30]
            assert (await shared.take(lease("3", limits=limits))).denied == "concurrency"
            await asyncio.sleep(0.1)
            verdict = await shared.take(lease("4", tokens=400_000, limits=limits))
            assert verdict.wait < 10
            redis.set("test:limit:{b}:tokens", f"{later + 30_000_000} {later}")
            settled = lease("5", owner="b", tokens=1000, limits=limits)
            settled.shared, settled.charged = True, Cost(1, 0, 0)
            await shared._settle([settled])
            verdict = await shared.take(lease("6", owner="b", limits=limits))
            assert [level.reset for level in verdict.levels if level] == [pytest.approx(0, abs=1), pytest.approx(29.9, abs=1)]


@pytest.mark.slow
async def test_a_cluster_keeps_limits_too() -> None:
    limits = Limits((5, None, None), concurrency=3)
    with cluster() as servers:
        async with limiter(f"redis+cluster://127.0.0.1:{servers[1].port}") as shared:
            for owner in "abcdef":
                leases = [lease(f"{owner}{place}", owner=owner, limits=limits) for place in range(4)]
                denials = [(await shared.take(taken)).denied for taken in leases]
                assert denials == [None, None, None, "concurrency"]
                for taken in leases[:3]:
                    shared.end(taken)
            await asyncio.sleep(0.3)
            assert [(await shared.take(lease(f"z{n}", limits=limits))).denied for n in range(3)] == [None, None, "requests"]
