"""The shared cache before a real Redis: what is shared, what leaves no trace, and what Redis's absence costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Connection

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, closed, metric
from tests.processes import wait_until
from tests.redis import RedisServer
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.settings import Settings
from yardstick_llm.gateway.store.link import Link, open_client
from yardstick_llm.gateway.store.redis import QUEUE_BYTES, QUEUE_VALUES, RedisStore

AVAILABLE = "yardstick_redis_available"
STORED = 'yardstick_cache_writes_total{result="stored"}'


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start() as running:
        yield running


@pytest.fixture
def shared(server: RedisServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of gateways that share the module's Redis, under names of the test's own."""
    return {"redis_url": server.url, "redis_prefix": f"t{abs(hash(request.node.nodeid))}", "redis_seconds": 1.0}


def score(client: httpx.Client, items: list[list[int]], **headers: str) -> httpx.Response:
    body = {"query": [1, 2], "items": items, "label_token_ids": [3, 4]}
    answer = client.post("/v1/score", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def hits(answer: httpx.Response) -> str:
    return answer.headers["x-yardstick-cache"]


def test_gateways_share_results(start: Start, shared: dict[str, Any]) -> None:
    engines = FakeEngine(), FakeEngine()
    first, second = (start(engine, **shared) for engine in engines)
    answer = score(first, [[5], [6], [5]])
    assert hits(answer) == "0/3"
    wait_until(lambda: metric(first, STORED) == 2)
    again = score(second, [[6], [5], [7]])
    assert hits(again) == "2/3"
    assert again.json()["scores"][:2] == [pytest.approx(row) for row in answer.json()["scores"][1::-1]]
    assert [len(request.branches) for request in engines[1].scores] == [1]
    assert metric(second, 'yardstick_cache_lookups_total{model="fake",result="hit"}') == 2
    assert metric(second, 'yardstick_cache_lookups_total{model="fake",result="miss"}') == 1
    assert metric(second, "yardstick_cache_lookup_seconds_count") == 1


def test_a_late_answer_of_redis_is_read_while_no_engine_is_ready(start: Start, shared: dict[str, Any], server: RedisServer) -> None:
    """Redis is silent when the request looks up, and there again when it has waited for an engine in vain."""
    engine = FakeEngine()
    client = start(engine, **shared | {"redis_seconds": 0.4, "wait_seconds": 2.0})
    answer = score(client, [[5], [6]])
    wait_until(lambda: metric(client, STORED) == 2)
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    server.client().client_pause(800)
    again = score(client, [[5], [6]])
    assert hits(again) == "2/2"
    assert again.json()["scores"] == [pytest.approx(row) for row in answer.json()["scores"]]
    assert metric(client, 'yardstick_redis_errors_total{kind="timeout"}') > 0
    body = {"query": [1, 2], "items": [[5], [7]], "label_token_ids": [3, 4]}
    assert client.post("/v1/score", json=body).status_code == 503


def test_clients_decide_what_is_kept(start: Start, shared: dict[str, Any], server: RedisServer) -> None:
    engine = FakeEngine()
    client = start(engine, **shared)
    with server.client() as redis:

        def names() -> list[bytes]:
            return redis.keys(f"{shared['redis_prefix']}:*")

        score(client, [[5]], **{"cache-control": "no-store"})
        score(client, [[6]])
        wait_until(lambda: len(names()) > 0)
        time.sleep(0.05)
        assert len(names()) == 1, "no-store left no trace"
        assert hits(score(client, [[6]], **{"cache-control": "no-cache"})) == "0/1"
        assert hits(score(client, [[6]], **{"cache-control": "no-store"})) == "0/1"
        assert hits(score(client, [[6]])) == "1/1"
    assert len(engine.scores) == 4


def test_entries_expire_one_after_the_other(start: Start, shared: dict[str, Any], server: RedisServer) -> None:
    client = start(FakeEngine(), cache_ttl_seconds=100, **shared)
    score(client, [[item] for item in range(50)])
    wait_until(lambda: metric(client, STORED) == 50)
    with server.client() as redis:
        left = [redis.pttl(name) for name in redis.keys(f"{shared['redis_prefix']}:*")]
    assert 85_000 < min(left) < 97_000 < 103_000 < max(left) <= 110_000


def test_what_was_not_written_here_is_a_miss(start: Start, shared: dict[str, Any], server: RedisServer) -> None:
    client = start(FakeEngine(), **shared)
    expected = score(client, [[5], [6]]).json()["scores"]
    wait_until(lambda: metric(client, STORED) == 2)
    with server.client() as redis:
        for name, junk in zip(redis.keys(f"{shared['redis_prefix']}:*"), (b"", b"\x00" * 7), strict=True):
            redis.set(name, junk)
    answer = score(client, [[5], [6]])
    assert hits(answer) == "0/2"
    assert answer.json()["scores"] == expected


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_commands_are_packed_as_the_library_packs_them(scheme: str) -> None:
    client = open_client(Settings(engines=("http://x",), redis_url=f"{scheme}://127.0.0.1:1"))
    command = ["CONFIG GET", b"a\r\n b", "\u00fc", "", 0, -5, 2.5, b"\x00" * 10_000]
    ours, library = client.connection_pool.make_connection(), Connection()
    assert len(ours.pack_command(*command)) == 1
    assert b"".join(ours.pack_command(*command)) == b"".join(library.pack_command(*command))


@pytest.mark.parametrize("length", [1, 4096])
async def test_what_the_queue_has_no_room_for_is_dropped_and_counted(server: RedisServer, length: int) -> None:
    telemetry = Telemetry()
    link = Link(open_client(Settings(engines=("http://x",), redis_url=server.url)), telemetry, seconds=1)
    store = RedisStore(link, telemetry, prefix=f"full{length}", cache_seconds=60)
    room = min(QUEUE_VALUES, QUEUE_BYTES // (4 * length))

    def written(result: str) -> float:
        lines = b"".join(telemetry.exposition()).decode().splitlines()
        return sum(
            float(line.split()[1]) for line in lines if line.startswith(f'yardstick_cache_writes_total{{result="{result}"}}')
        )

    await store.cache({b"early": b"1"})  # nobody has seen Redis yet
    await closed(link)
    values = {place.to_bytes(16, "big"): place.to_bytes(4, "big") * length for place in range(room + 5)}
    await store.cache(values)
    assert written("dropped") == 6
    await store.stop()
    assert written("stored") == room
    kept = [*values][7], [*values][room + 1]
    assert await store.cached(kept) == [values[kept[0]], None]
    await store.cache({b"later": b"1"})
    await store.stop()
    assert await store.cached([b"later"]) == [b"1"], "there is room again"
    await link.stop()
