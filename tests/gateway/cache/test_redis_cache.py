"""The shared cache before a real Redis: what is shared, what leaves no trace, and what Redis's absence costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Connection

from gateway.cache.redis import QUEUE_ENTRIES, QUEUE_NUMBERS, RedisCache
from gateway.metrics.telemetry import Telemetry
from gateway.redis.connect import open_client
from gateway.redis.link import Link
from gateway.settings import Settings
from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, closed, metric, metrics
from tests.processes import wait_until
from tests.redis import Certificates, RedisServer, cluster

pytestmark = pytest.mark.redis

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


def connected(client: httpx.Client) -> httpx.Client:
    wait_until(lambda: metric(client, AVAILABLE) == 1)
    return client


def score(client: httpx.Client, items: list[list[int]], **headers: str) -> httpx.Response:
    body = {"query": [1, 2], "items": items, "label_token_ids": [3, 4]}
    answer = client.post("/v1/score", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def hits(answer: httpx.Response) -> str:
    return answer.headers["x-yardstick-cache"]


def test_gateways_share_results(start: Start, shared: dict[str, Any]) -> None:
    engines = FakeEngine(), FakeEngine()
    first, second = (connected(start(engine, **shared)) for engine in engines)
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


def test_another_fingerprint_shares_nothing(start: Start, shared: dict[str, Any]) -> None:
    first = connected(start(FakeEngine(), **shared))
    score(first, [[5]])
    wait_until(lambda: metric(first, STORED) == 1)
    assert hits(score(connected(start(FakeEngine(fingerprint="fake-2"), **shared)), [[5]])) == "0/1"


def test_clients_decide_what_is_kept(start: Start, shared: dict[str, Any], server: RedisServer) -> None:
    engine = FakeEngine()
    client = connected(start(engine, **shared))
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
    client = connected(start(FakeEngine(), cache_ttl_seconds=100, **shared))
    score(client, [[item] for item in range(50)])
    wait_until(lambda: metric(client, STORED) == 50)
    with server.client() as redis:
        left = [redis.pttl(name) for name in redis.keys(f"{shared['redis_prefix']}:*")]
    assert 85_000 < min(left) < 97_000 < 103_000 < max(left) <= 110_000


def test_what_was_not_written_here_is_a_miss(start: Start, shared: dict[str, Any], server: RedisServer) -> None:
    client = connected(start(FakeEngine(), **shared))
    expected = score(client, [[5], [6]]).json()["scores"]
    wait_until(lambda: metric(client, STORED) == 2)
    with server.client() as redis:
        for name, junk in zip(redis.keys(f"{shared['redis_prefix']}:*"), (b"", b"\x00" * 7), strict=True):
            redis.set(name, junk)
    answer = score(client, [[5], [6]])
    assert hits(answer) == "0/2"
    assert answer.json()["scores"] == expected


def test_a_full_redis_evicts_and_goes_on(start: Start) -> None:
    with RedisServer.start("--maxmemory", "1500kb", "--maxmemory-policy", "allkeys-lru") as small:
        client = connected(start(FakeEngine(), redis_url=small.url, redis_seconds=1.0))
        with small.client() as redis:
            for place in range(100):
                score(client, [[1 + place, 1 + item] for item in range(60)])
                if redis.info("stats")["evicted_keys"]:
                    break
            assert redis.info("stats")["evicted_keys"] > 0
        score(client, [[301]])
        wait_until(lambda: hits(score(client, [[301]])) == "1/1")


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_commands_are_packed_as_the_library_packs_them(scheme: str) -> None:
    client = open_client(Settings(engines=("http://x",), redis_url=f"{scheme}://127.0.0.1:1"))
    command = ["CONFIG GET", b"a\r\n b", "\u00fc", "", 0, -5, 2.5, b"\x00" * 10_000]
    ours, library = client.connection_pool.make_connection(), Connection()
    assert len(ours.pack_command(*command)) == 1
    assert b"".join(ours.pack_command(*command)) == b"".join(library.pack_command(*command))


async def test_what_the_queue_has_no_room_for_is_dropped_and_counted(server: RedisServer) -> None:
    telemetry = Telemetry()
    link = Link(open_client(Settings(engines=("http://x",), redis_url=server.url)), telemetry, seconds=1)
    cache = RedisCache(link, telemetry, prefix="full", ttl_seconds=60)
    await cache.put_many({b"early": (1.0,)})  # nobody has seen Redis yet
    await closed(link)
    await cache.put_many({place.to_bytes(16, "big"): (float(place),) for place in range(QUEUE_ENTRIES + 5)})
    assert b'yardstick_cache_writes_total{result="dropped"} 6.0' in b"".join(telemetry.exposition())
    await cache.stop()
    assert b'yardstick_cache_writes_total{result="stored"} 20000.0' in b"".join(telemetry.exposition())
    assert await cache.get_many([(7).to_bytes(16, "big"), (QUEUE_ENTRIES + 1).to_bytes(16, "big")]) == [(7.0,), None]
    await link.stop()


async def test_rows_of_different_lengths_are_kept_apart(server: RedisServer) -> None:
    telemetry = Telemetry()
    link = Link(open_client(Settings(engines=("http://x",), redis_url=server.url)), telemetry, seconds=1)
    cache = RedisCache(link, telemetry, prefix="lengths", ttl_seconds=60)
    await closed(link)
    rows = {place.to_bytes(16, "big"): tuple(float(place + number) for number in range(1 + place // 3 % 3)) for place in range(20)}
    await cache.put_many(rows)
    await cache.stop()
    assert await cache.get_many(list(rows)) == list(rows.values())
    await link.stop()


async def test_long_rows_take_the_room_of_many(server: RedisServer) -> None:
    telemetry = Telemetry()
    link = Link(open_client(Settings(engines=("http://x",), redis_url=server.url)), telemetry, seconds=1)
    cache = RedisCache(link, telemetry, prefix="long", ttl_seconds=60)
    await closed(link)
    row, fit = (0.5,) * 4096, QUEUE_NUMBERS // 4096
    await cache.put_many({place.to_bytes(16, "big"): row for place in range(fit + 3)})
    assert b'yardstick_cache_writes_total{result="dropped"} 3.0' in b"".join(telemetry.exposition())
    await cache.stop()
    assert b'yardstick_cache_writes_total{result="stored"} %.1f' % fit in b"".join(telemetry.exposition())
    assert await cache.get_many([(7).to_bytes(16, "big"), fit.to_bytes(16, "big")]) == [row, None]
    await cache.put_many({b"later": (1.0,)})
    await cache.stop()
    assert await cache.get_many([b"later"]) == [(1.0,)], "there is room again"
    await link.stop()


def test_tls_with_an_authority_of_ones_own(start: Start, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with RedisServer.start(tls=certificates) as server:
        client = connected(start(FakeEngine(), redis_url=server.url, redis_ca_file=certificates.ca, redis_seconds=1.0))
        score(client, [[5]])
        wait_until(lambda: hits(score(client, [[5]])) == "1/1")
        stranger = start(FakeEngine(), redis_url=server.url, redis_seconds=1.0)
        assert hits(score(stranger, [[5]])) == "0/1"
        assert metric(stranger, AVAILABLE) == 0, "a certificate that nobody vouches for"


def test_a_user_of_redis_with_a_password_that_changes(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("one\n")
    rules = "~ys:* +ping +mget +set +get +del +eval +evalsha +time +zadd +zrem +zcard +zremrangebyscore +pexpire"
    with RedisServer.start() as server, server.client() as redis:
        redis.execute_command("ACL", "SETUSER", "gateway", "on", ">one", *rules.split())
        redis.execute_command("ACL", "SETUSER", "default", "on", "resetpass", ">admin")
        url = server.url.replace("127", "gateway@127")
        client = connected(start(FakeEngine(), redis_url=url, redis_password_file=file, redis_prefix="ys", redis_seconds=1.0))
        score(client, [[5]])
        wait_until(lambda: hits(score(client, [[5]])) == "1/1")
        with server.client(password="admin") as admin:
            admin.execute_command("ACL", "SETUSER", "gateway", "resetpass", ">two")
            file.write_text("two\n")
            admin.execute_command("CLIENT", "KILL", "USER", "gateway")
        score(client, [[6]])
        wait_until(lambda: hits(score(client, [[5]])) == "1/1")


def test_a_wrong_password_is_no_reason_to_fail(start: Start) -> None:
    with RedisServer.start("--requirepass", "right") as server:
        client = start(FakeEngine(), redis_url=server.url.replace("127", ":wrong@127"))
        score(client, [[5]])
        assert metric(client, AVAILABLE) == 0


@pytest.mark.slow
def test_a_cluster(start: Start) -> None:
    with cluster() as servers:
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        client = connected(start(FakeEngine(), redis_url=url, redis_seconds=1.0))
        items = [[item] for item in range(1, 31)]
        score(client, items)
        wait_until(lambda: metric(client, STORED) == 30)
        assert hits(score(client, items)) == "30/30"
        sizes = []
        for server in servers:
            with server.client() as redis:
                sizes.append(redis.dbsize())
        assert sum(sizes) == 30
        assert min(sizes) > 0, "every node has its part"
        servers[2].kill()
        for _ in range(20):
            score(client, items)


@dataclass
class Load:
    """Scores over and over from several threads, each time something new."""

    client: httpx.Client
    answers: list[httpx.Response] = field(default_factory=list)

    @contextmanager
    def running(self, workers: int) -> Iterator[Load]:
        over = threading.Event()

        def work(worker: int) -> None:
            place = 0
            while not over.is_set():
                place += 1
                body = {"query": [1 + worker, 1 + place // 300], "items": [[1 + place % 300]], "label_token_ids": [3]}
                self.answers.append(self.client.post("/v1/score", json=body))

        threads = [threading.Thread(target=work, args=[worker]) for worker in range(workers)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            over.set()
            for thread in threads:
                thread.join()


LIMIT = 0.2
"""Seconds that lookups may take where the time lost is measured: more than the default, so that a busy machine is not taken for
Redis."""


def slow_lookups(client: httpx.Client) -> float:
    """Return the lookups that took at least half of :data:`LIMIT`."""
    name = "yardstick_cache_lookup_seconds"
    count, quick = metrics(client, f"{name}_count", f'{name}_bucket{{le="0.1"}}')
    return count - quick


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stalled", "killed"])
def test_a_redis_that_goes_costs_its_limit_once_and_may_come_back(start: Start, how: str) -> None:
    workers = 4
    with RedisServer.start() as server:
        client = connected(start(FakeEngine(), redis_url=server.url, redis_seconds=LIMIT))
        load = Load(client)
        with load.running(workers):
            wait_until(lambda: len(load.answers) > 50)
            before = slow_lookups(client)
            server.pause() if how == "stalled" else server.kill()
            wait_until(lambda: metric(client, AVAILABLE) == 0)
            told = len(load.answers)
            time.sleep(1.0)
            lost = slow_lookups(client) - before
            assert len(load.answers) - told > 10, "traffic goes on"
            assert lost <= workers + 2, "those under way when it went, and with a busy machine another or two; not every one"
            if how == "stalled":
                server.resume()
            else:
                server.boot()
            wait_until(lambda: metric(client, AVAILABLE) == 1, 20)
            stored = metric(client, STORED)
            wait_until(lambda: metric(client, STORED) > stored)
        assert {answer.status_code for answer in load.answers} == {200}


def test_a_redis_that_never_was_costs_nothing(start: Start) -> None:
    client = start(FakeEngine(), redis_url="redis://127.0.0.1:9", redis_seconds=LIMIT)
    for item in range(20):
        score(client, [[1 + item]])
    assert slow_lookups(client) == 0
    assert metric(client, AVAILABLE) == 0
