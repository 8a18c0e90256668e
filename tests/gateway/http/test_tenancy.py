"""Priorities and weight of a key at engines, and its share of the places for waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.keys import by, entry, write
from tests.processes import until, wait_until
from yardstick_llm.engine import wire

PRIORITY_RANGE = (-100, 100)
BODIES: dict[str, dict[str, Any]] = {
    "score": {"query": [1], "items": [[2]], "label_token_ids": [1]},
    "completions": {"prompt": [1, 2], "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "length": {"input": [[1, 2]]},
}


def asked(engine: FakeEngine, path: str) -> wire.Score | wire.Generate:
    """The last message to the engine for an endpoint."""
    return {"score": engine.scores, "length": engine.values}.get(path, engine.generates)[-1]  # type: ignore[return-value]


KEYS = [entry("a", weight=2.5), entry("b"), entry("batch", priority_min=10, priority_max=50), entry("first", priority_min=-500)]
RANGES = {"a": PRIORITY_RANGE, "batch": (10, 50), "first": (-500, PRIORITY_RANGE[1])}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """An engine, and a client of a gateway with :data:`KEYS` before it."""
    engine = FakeEngine()
    with gateways() as start:
        yield engine, start(engine, api_keys_file=write(tmp_path_factory.mktemp("keys") / "keys", *KEYS))


@pytest.mark.parametrize("path", BODIES)
def test_priorities_have_a_range(keyed: tuple[FakeEngine, httpx.Client], path: str) -> None:
    engine, client = keyed
    for name, (least, most) in RANGES.items():
        for priority, expected in ((least, least), (most, most), (None, max(0, least))):
            body = BODIES[path] | {"priority": priority}
            assert client.post(f"/v1/{path}", json=body, headers=by(name) | {"cache-control": "no-cache"}).status_code == 200
            assert asked(engine, path).priority == expected
        for priority in (least - 1, most + 1, -(2**31)):
            refused = client.post(f"/v1/{path}", json=BODIES[path] | {"priority": priority}, headers=by(name))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "priority"
            assert f"{least} to {most}" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_engines_learn_the_tenant_and_its_weight(keyed: tuple[FakeEngine, httpx.Client], path: str) -> None:
    engine, client = keyed
    callers = []
    for name in "ab":
        headers = by(name) | {"x-request-id": f"r-{name}", "cache-control": "no-cache"}
        assert client.post(f"/v1/{path}", json=BODIES[path], headers=headers).status_code == 200
        callers.append(asked(engine, path).caller)
    assert [(caller.request_id, caller.weight, caller.keep_prefix) for caller in callers] == [("r-a", 2.5, True), ("r-b", 1, True)]
    assert callers[0].tenant != callers[1].tenant
    assert client.post(f"/v1/{path}", json=BODIES[path], headers=by("b") | {"cache-control": "no-store"}).status_code == 200
    assert not asked(engine, path).caller.keep_prefix


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "others"), [(1.0, 4), (3.0, 6)])
def test_a_flood_while_no_engine_is_ready_keeps_no_other_key_out(start: Start, tmp_path: Path, weight: float, others: int) -> None:
    """Of eight places, each key gets its share by weight."""
    engine = FakeEngine()
    file = write(tmp_path / "keys", entry("flood"), entry("other", weight=weight))
    client = start(engine, api_keys_file=file, wait_seconds=20, max_waiting=8)
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=30, limits=limits) as asking:

            def post(name: str, path: str) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(
                    asking.post(f"/v1/{path}", json=BODIES[path], headers=by(name) | {"cache-control": "no-store"})
                )

            flood = [post("flood", path) for path in ["score", "completions", "length"] * 10]
            await until(lambda: sum(task.done() for task in flood) == 22)
            served = [post("other", path) for path in [*BODIES, *BODIES][:others]]
            await until(lambda: sum(task.done() for task in flood) == 22 + others)
            assert "yardstick_requests_waiting 8.0" in (await asking.get("/metrics")).text
            engine.ready = True
            assert [(await task).status_code for task in served] == [200] * others
            statuses = [(await task).status_code for task in flood]
            assert (statuses.count(200), statuses.count(503)) == (8 - others, 22 + others)

    asyncio.run(scenario())
