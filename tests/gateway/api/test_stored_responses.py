"""Stored responses that gateways share through a real Redis: tenants, bounds, expiry, and what happens without Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import entry as key_entry
from tests.gateway.keys import write
from tests.processes import wait_until
from tests.redis import RedisServer


def create(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, "seed": 1} | body)


def test_gateways_share_responses_and_refuse_to_store_without_redis(start: Start) -> None:
    with RedisServer.start() as server:
        engine = FakeEngine(says=ids("red"))
        settings = {"redis_url": server.url, "redis_seconds": 2.0}
        first, second = start(engine, **settings), start(FakeEngine(), **settings)
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


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
def test_responses_of_a_key_displace_none_of_another_and_expire(start: Start, tmp_path: Path, shared: bool) -> None:
    file = write(tmp_path / "keys", key_entry("a"), key_entry("b"))
    with RedisServer.start() as server:
        settings = {"redis_url": server.url, "redis_seconds": 2.0} if shared else {}
        engine = FakeEngine(says=ids("red"))
        client = start(engine, api_keys_file=file, stored_responses=4, stored_responses_seconds=3, **settings)

        def stored(key: str) -> str:
            client.headers["authorization"] = f"Bearer {key}"
            return create(client, store=True).json()["id"]

        def found(key: str, id: str) -> bool:
            return client.get(f"/v1/responses/{id}", headers={"authorization": f"Bearer {key}"}).status_code == 200

        first = stored("a")
        many = [stored("b") for _ in range(6)]
        assert found("a", first)
        assert not found("b", first)
        assert [found("b", id) for id in many] == [False] * 3 + [True] * 3
        wait_until(lambda: not found("a", first))
