"""Connections to Redis: TLS, users, clusters, and a Redis that goes away."""

from __future__ import annotations

import itertools
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, metric, metrics
from tests.gateway.store.test_cached_results import AVAILABLE, STORED, hits, score
from tests.processes import wait_until
from tests.redis import Certificates, RedisServer, cluster
from yardstick_llm import gateway


def test_tls_with_an_authority_of_ones_own(start: Start, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with RedisServer.start(tls=certificates) as server:
        client = start(FakeEngine(), redis_url=server.url, redis_ca_file=certificates.ca, redis_seconds=1.0)
        score(client, [[5]])
        wait_until(lambda: hits(score(client, [[5]])) == "1/1")
        stranger = start(FakeEngine(), finds_redis=False, redis_url=server.url, redis_seconds=1.0)
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
        client = start(FakeEngine(), redis_url=url, redis_password_file=file, redis_prefix="ys", redis_seconds=1.0)
        score(client, [[5]])
        wait_until(lambda: hits(score(client, [[5]])) == "1/1")
        wait_until(lambda: metric(client, FORBIDDEN) > 0)  # of those for adapters
        assert metric(client, AVAILABLE) == 1
        assert hits(score(client, [[5]])) == "1/1"
        with server.client(password="admin") as admin:
            admin.execute_command("ACL", "SETUSER", "gateway", "resetpass", ">two")
            file.write_text("two\n")
            admin.execute_command("CLIENT", "KILL", "USER", "gateway")
        score(client, [[6]])
        wait_until(lambda: hits(score(client, [[5]])) == "1/1")


def rights() -> dict[str, list[str]]:
    """The commands that docs/caching.md asks for, by purpose."""
    told = (Path(__file__).parents[3] / "docs/caching.md").read_text().partition("A Redis user needs ")[2].partition("cluster")[0]
    parts = dict(zip(("all", "kept"), told.split(";"), strict=False))
    return {purpose: re.findall(r"\+[a-z]+", text) for purpose, text in parts.items()}


def test_a_user_with_the_rights_of_the_documentation(start: Start) -> None:
    with RedisServer.start() as server, server.client() as redis:
        granted = ["~ys:*", *chain.from_iterable(rights().values())]
        redis.execute_command("ACL", "SETUSER", "gateway", "on", ">one", *granted)
        url = server.url.replace("127", "gateway:one@127")
        client = start(FakeEngine(), redis_url=url, redis_prefix="ys", redis_seconds=1.0)
        score(client, [[5]])
        client.put("/v1/catalogues/shop", json={"ttl_seconds": 60}).raise_for_status()
        for text in ("red shoes", "blue shoes"):
            items = [{"id": f"i{place}", "text": text} for place in range(3)]
            client.put("/v1/catalogues/shop/items", json=items).raise_for_status()
            asked = {"query": " x", "catalogue": "shop", "ids": ["i0"], "labels": ["a"]}
            client.post("/v1/score", json=asked).raise_for_status()
        for path in ("shop", "shop/items"):
            client.get(f"/v1/catalogues/{path}").raise_for_status()
        for path in ("shop/items?id=i1", "shop"):
            client.delete(f"/v1/catalogues/{path}").raise_for_status()
        stored = [client.post("/v1/responses", json={"input": "hi", "store": True}).raise_for_status().json() for _ in range(2)]
        assert all(each["store"] for each in stored)
        client.delete(f"/v1/responses/{stored[0]['id']}").raise_for_status()
        assert redis.acl_log() == []
        used = set(
            re.findall(r"redis\.call\('(\w+)'", "".join(path.read_text() for path in Path(gateway.__path__[0]).rglob("*.py")))
        )
        assert {f"+{command.lower()}" for command in used} <= {*granted}, "also in paths that were not taken here"


def test_a_wrong_password_is_no_reason_to_fail(start: Start) -> None:
    with RedisServer.start("--requirepass", "right") as server:
        client = start(FakeEngine(), finds_redis=False, redis_url=server.url.replace("127", ":wrong@127"))
        score(client, [[5]])
        assert metric(client, AVAILABLE) == 0


@pytest.mark.slow
def test_a_cluster(start: Start) -> None:
    with cluster() as servers:
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        client = start(FakeEngine(), redis_url=url, redis_seconds=1.0)
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
        told = client.post("/v1/responses", json={"input": "hi", "store": True}).raise_for_status().json()
        assert client.get(f"/v1/responses/{told['id']}").json() == told
        assert client.delete(f"/v1/responses/{told['id']}").status_code == 200
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


FORBIDDEN = 'yardstick_redis_errors_total{kind="rights"}'
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
        client = start(FakeEngine(), redis_url=server.url, redis_seconds=LIMIT)
        load = Load(client)
        with load.running(workers):
            wait_until(lambda: len(load.answers) > 20)
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


class Address:
    """An address that leads to one server, and later to another; connections that are open stay where they are."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                sink.sendall(data)


def test_after_a_failover_connections_to_the_old_primary_are_given_up(start: Start) -> None:
    """It lives on as a replica and answers every PING, but takes no writes; its address leads to the new primary."""
    with RedisServer.start() as old, RedisServer.start() as new, closing(Address(old.port)) as address:
        client = start(FakeEngine(), redis_url=f"redis://127.0.0.1:{address.port}", redis_seconds=LIMIT)
        with old.client() as plain:
            plain.replicaof("127.0.0.1", str(new.port))
        address.target = new.port
        place = itertools.count(1)

        def stored() -> int:
            score(client, [[next(place)]])
            with new.client() as plain:
                return int(plain.dbsize())

        wait_until(lambda: stored() > 0, pause=0.1)
        wait_until(lambda: metric(client, AVAILABLE) == 1)


def test_a_redis_that_never_was_costs_nothing(start: Start) -> None:
    client = start(FakeEngine(), finds_redis=False, redis_url="redis://127.0.0.1:9", redis_seconds=LIMIT)
    for item in range(20):
        score(client, [[1 + item]])
    assert slow_lookups(client) == 0
    assert metric(client, AVAILABLE) == 0
