"""The stores of responses, in memory and in a real Redis: bounds, tenants, expiry, and what happens without Redis."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.configuration.bounds import ResponseBounds
from gateway.metrics.telemetry import Telemetry
from gateway.redis.connect import open_client
from gateway.redis.link import Link
from gateway.responses.shared import RedisStore
from gateway.responses.store import ENTRY_BYTES, MemoryStore, Stored, Unavailable
from gateway.settings import Settings
from gateway.text.prepared import Items
from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Clock, Start, closed, metric
from tests.gateway.keys import entry as key_entry
from tests.gateway.keys import write
from tests.processes import wait_until
from tests.redis import RedisServer, cluster

SMALL = ResponseBounds(8, 8 * ENTRY_BYTES, 60.0)


def entry(size: int = 0, item: bytes = b"") -> Stored:
    return Stored(b"r" * size, b"", Items.of([("msg_1", item)] if item else []))


def id_of(number: int) -> str:
    return f"resp_{number:032x}"


async def puts(store: Any, operations: list[tuple[str, int, int]]) -> list[bool]:
    stored = []
    for tenant, number, size in operations:
        stored.append(await store.put(tenant, id_of(number), entry(size)))
        await asyncio.sleep(0.0015)  # Redis orders entries by milliseconds
    return stored


async def left(store: Any, operations: list[tuple[str, int, int]]) -> set[int]:
    return {number for tenant, number, _ in operations if await store.get(tenant, id_of(number)) is not None}


def test_a_tenant_that_stores_much_loses_its_own_responses() -> None:
    async def check() -> None:
        store = MemoryStore(SMALL)
        modest = [("modest", number, 10) for number in range(2)]
        greedy = [("greedy", number, 20) for number in range(10, 60)]
        assert all(await puts(store, [*modest, *greedy]))
        assert await left(store, modest) == {0, 1}
        assert max(await left(store, greedy)) == 59
        assert store.entries <= SMALL.entries
        assert store.bytes <= SMALL.bytes
        assert not await store.put("greedy", id_of(99), entry(SMALL.bytes))
        assert await left(store, modest) == {0, 1}

    asyncio.run(check())


def test_many_tiny_responses_of_one_key_displace_none_of_another(server: RedisServer) -> None:
    """The bound that is reached decides who loses: of entries the key with most of them, of bytes the key with most bytes."""

    async def check() -> None:
        few = ResponseBounds(20, 1 << 20, 60.0)
        large = [("large", number, 40_000) for number in range(5)]
        tiny = [("tiny", number, 0) for number in range(10, 60)]
        huge = [("huge", number, 200_000) for number in range(100, 106)]
        async with redis_store(server.url, few, "tiny") as shared:
            for store in (MemoryStore(few), shared):
                assert all(await puts(store, [*large, *tiny]))
                assert await left(store, large) == {0, 1, 2, 3, 4}
                assert await left(store, tiny) == set(range(45, 60)), "the oldest went"
                assert all(await puts(store, huge))
                assert await left(store, large) == {0, 1, 2, 3, 4}
                assert await left(store, huge) == {102, 103, 104, 105}

    asyncio.run(check())


def test_responses_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        clock = Clock()
        store = MemoryStore(SMALL, clock.monotonic)
        await store.put("a", id_of(1), entry())
        clock.now += 59
        assert await store.get("a", id_of(1)) is not None
        clock.now += 1
        assert await store.get("a", id_of(1)) is None
        assert not await store.delete("a", id_of(1))
        assert (store.entries, store.bytes) == (0, 0)

    asyncio.run(check())


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start() as running:
        yield running


@asynccontextmanager
async def redis_store(url: str, bounds: ResponseBounds = SMALL, prefix: str = "test") -> AsyncIterator[RedisStore]:
    link = Link(open_client(Settings(engines=("http://x",), redis_url=url)), Telemetry(), seconds=2)
    await closed(link)
    yield RedisStore(link, bounds, prefix=prefix)
    await link.stop()


@pytest.mark.parametrize("seed", range(3))
def test_both_stores_keep_the_same_responses(server: RedisServer, seed: int) -> None:
    """Random writes and deletions of three tenants, beyond all bounds."""
    draw = random.Random(seed)
    operations = [(draw.choice("abc"), number, draw.randrange(3000)) for number in range(60)]
    removed = draw.sample(operations, 10)

    async def check() -> None:
        memory = MemoryStore(SMALL)
        async with redis_store(server.url, prefix=f"seed{seed}") as shared:
            for store in (memory, shared):
                await puts(store, operations[:40])
                for tenant, number, _ in removed:
                    await store.delete(tenant, id_of(number))
                await puts(store, operations[40:])
            kept = await left(memory, operations)
            assert await left(shared, operations) == kept
            assert 2 <= len(kept) <= SMALL.entries
        client = server.client()
        told = int(client.get(f"seed{seed}:{{responses}}:bytes") or 0)
        assert told == memory.bytes
        assert client.zcard(f"seed{seed}:{{responses}}:ages") == memory.entries
        assert len(client.hkeys(f"seed{seed}:{{responses}}:sizes")) == memory.entries

    asyncio.run(check())


def test_expired_responses_leave_redis(server: RedisServer) -> None:
    async def check() -> None:
        async with redis_store(server.url, ResponseBounds(8, 1 << 20, 0.2), "expiry") as store:
            assert await store.put("a", id_of(1), entry(item=b'{"role":"user"}'))
            found = await store.get("a", id_of(1))
            assert found is not None
            assert (found.input.ids, found.input.at(0)) == (["msg_1"], b'{"role":"user"}')
            assert await store.get("b", id_of(1)) is None
            await asyncio.sleep(0.3)
            assert await store.get("a", id_of(1)) is None
            await store.put("b", id_of(2), entry())
            assert server.client().zrange("expiry:{responses}:ages", 0, -1) == [f"b:{id_of(2)}".encode()]

    asyncio.run(check())


@pytest.mark.slow
def test_a_cluster_keeps_responses() -> None:
    async def check(url: str) -> None:
        async with redis_store(url) as store:
            operations = [("a", number, 100) for number in range(20)]
            assert all(await puts(store, operations))
            assert max(await left(store, operations)) == 19
            assert await store.delete("a", id_of(19))

    with cluster() as nodes:
        asyncio.run(check(nodes[0].url.removesuffix("/0").replace("redis://", "redis+cluster://")))


def create(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, "seed": 1} | body)


def test_gateways_share_responses_and_refuse_to_store_without_redis(start: Start) -> None:
    with RedisServer.start() as server:
        engine = FakeEngine(says=ids("red"))
        settings = {"redis_url": server.url, "redis_seconds": 2.0}
        first, second = start(engine, **settings), start(FakeEngine(), **settings)
        for client in (first, second):
            wait_until(lambda client=client: metric(client, "yardstick_redis_available") == 1)
        told = create(first, store=True).json()
        path = f"/v1/responses/{told['id']}"
        assert second.get(path).json() == told
        assert create(second, previous_response_id=told["id"], store=True).status_code == 200
        server.kill()
        assert second.get(path).status_code == 503
        wait_until(lambda: metric(second, "yardstick_redis_available") == 0)
        for answer in (
            second.get(path),
            second.delete(path),
            create(second, store=True),
            create(second, previous_response_id=told["id"]),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert answer.headers["retry-after"] == "1"
        plain = create(second)
        assert (plain.status_code, plain.json()["store"]) == (200, False)


def test_short_pauses_of_redis_lose_no_stored_response(start: Start, tmp_path: Path) -> None:
    """Calls for limits and cached results do time out, and the gateway sends no more of them until Redis answers again."""
    file = write(tmp_path / "keys", key_entry("a", requests_per_minute=100_000))
    with RedisServer.start() as server:
        client = start(FakeEngine(says=ids("red")), redis_url=server.url, api_keys_file=file)
        client.headers["authorization"] = "Bearer a"
        wait_until(lambda: metric(client, "yardstick_redis_available") == 1)
        ends = threading.Event()

        def stored() -> list[int]:
            statuses = []
            while not ends.is_set():
                told = create(client, store=True)
                statuses += [told.status_code, client.get(f"/v1/responses/{told.json()['id']}").status_code]
            return statuses

        with ThreadPoolExecutor() as pool:
            asked = pool.submit(stored)
            try:
                for pauses in range(5):
                    server.pause()
                    time.sleep(0.25)
                    server.resume()
                    time.sleep(0.1 * pauses)
            finally:
                ends.set()
            statuses = asked.result()
        assert len(statuses) > 10
        assert set(statuses) == {200}
        assert metric(client, 'yardstick_redis_errors_total{kind="timeout"}') > 0


def test_a_response_that_cannot_be_stored_any_more_is_answered(start: Start) -> None:
    with RedisServer.start() as server:
        engine = FakeEngine(says=ids("red"))
        client = start(engine, redis_url=server.url, redis_seconds=2.0)
        wait_until(lambda: metric(client, "yardstick_redis_available") == 1)
        engine.frozen = True

        def die() -> None:
            wait_until(lambda: bool(engine.running))
            server.kill()
            engine.frozen = False

        told = asyncio.run(_both(lambda: create(client, store=True), die))
        assert told.status_code == 200
        assert told.json()["store"] is False
        assert metric(client, 'yardstick_stored_responses_total{result="dropped"}') == 1


async def _both(ask: Any, act: Any) -> httpx.Response:
    answer, _ = await asyncio.gather(asyncio.to_thread(ask), asyncio.to_thread(act))
    return answer


def test_check_of_a_store_that_is_away() -> None:
    link = Link(open_client(Settings(engines=("http://x",), redis_url="redis://127.0.0.1:1")), Telemetry(), seconds=1)
    with pytest.raises(Unavailable):
        RedisStore(link, SMALL, prefix="x").check()
