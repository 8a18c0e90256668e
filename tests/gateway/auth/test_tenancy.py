"""Priorities and weight of a key at engines, and its share of the places for waiting requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from gateway.cache.base import ResultCache
from gateway.cache.policy import CachePolicy
from gateway.handling.access import salt_of
from gateway.keys import PRIORITY_RANGE
from gateway.pool.dispatch import WaitingRoom
from gateway.pool.fanout import FanOut, Prompts
from gateway.pool.placement import affinity_of
from gateway.scoring.scorer import Scorer, result_keys
from gateway.store.memory import MemoryStore
from tests.fakes import FakeEngine, served
from tests.gateway.admission.test_key_limits import by, entry, write
from tests.gateway.conftest import Start, metric
from tests.gateway.pool.test_pool import Told, engines_ready, pool_of
from tests.processes import until, wait_until

BODIES: dict[str, dict[str, Any]] = {
    "score": {"query": [1], "items": [[2]], "label_token_ids": [1]},
    "completions": {"prompt": [1, 2], "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "length": {"input": [[1, 2]]},
}


def asked(engine: FakeEngine, path: str) -> wire.Score | wire.Generate:
    """The last message to the engine for an endpoint."""
    return {"score": engine.scores, "length": engine.values}.get(path, engine.generates)[-1]  # type: ignore[return-value]


@pytest.mark.parametrize("path", BODIES)
def test_priorities_have_a_range(start: Start, tmp_path: Path, path: str) -> None:
    engine = FakeEngine()
    file = write(tmp_path / "keys", entry("a"), entry("batch", priority_min=10, priority_max=50), entry("first", priority_min=-500))
    client = start(engine, api_keys_file=file)
    ranges = {"a": PRIORITY_RANGE, "batch": (10, 50), "first": (-500, PRIORITY_RANGE[1])}
    for name, (least, most) in ranges.items():
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


def test_priorities_have_a_range_without_keys(shared: httpx.Client) -> None:
    least, most = PRIORITY_RANGE
    for path, body in BODIES.items():
        assert shared.post(f"/v1/{path}", json=body | {"priority": least}).status_code == 200
        refused = shared.post(f"/v1/{path}", json=body | {"priority": most + 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("path", BODIES)
def test_engines_learn_the_tenant_and_its_weight(start: Start, tmp_path: Path, path: str) -> None:
    engine = FakeEngine()
    client = start(engine, api_keys_file=write(tmp_path / "keys", entry("a", weight=2.5), entry("b")))
    callers = []
    for name in "ab":
        assert client.post(f"/v1/{path}", json=BODIES[path], headers=by(name) | {"x-request-id": f"r-{name}"}).status_code == 200
        callers.append(asked(engine, path).caller)
    assert [(caller.request_id, caller.weight, caller.keep_prefix) for caller in callers] == [("r-a", 2.5, True), ("r-b", 1, True)]
    assert callers[0].tenant != callers[1].tenant
    assert client.post(f"/v1/{path}", json=BODIES[path], headers=by("b") | {"cache-control": "no-store"}).status_code == 200
    assert not asked(engine, path).caller.keep_prefix


@given(
    pairs=st.lists(
        st.tuples(st.sampled_from([b"", b"g" * 16, b"h" * 16]), st.none() | st.text(max_size=4)), unique=True, max_size=12
    )
)
def test_each_pair_of_group_and_salt_is_a_namespace(pairs: list[tuple[bytes, str | None]]) -> None:
    salts = [salt_of(*pair) for pair in pairs]
    assert len(set(salts)) == len(pairs)
    keys = [result_keys("f", wire.Labels([1]), [2], [[3]], salt=salt)[0] for salt in salts]
    assert len(set(keys)) == len(pairs)
    affinities = [affinity_of([1] * 20, wire.Caller(cache_salt=salt)) for salt in salts]
    assert len(set(affinities)) == len(pairs)


def test_without_a_salt_names_of_results_are_those_of_earlier_versions() -> None:
    """Results that Redis holds stay usable after an upgrade."""
    assert result_keys("fake-1", wire.Labels([3, 4]), [1, 2], [[5]], salt="")[0].hex() == "1334f84ee3a6dce1fd5013f625f42682"


def test_what_leaves_nothing_prefers_no_replica() -> None:
    assert affinity_of([1] * 20, wire.Caller(keep_prefix=False)) is None


async def test_the_longest_wait_in_a_queue_is_told() -> None:
    engines = [FakeEngine(queue_seconds=seconds) for seconds in (0.25, 1.5)]
    source = Told()
    with served(engines[0]) as one, served(engines[1]) as two:
        async with pool_of(source) as (pool, dispatcher, telemetry):
            source.say(one, two)
            await until(lambda: engines_ready(telemetry) == 2)
            scorer = Scorer(ResultCache(MemoryStore(100, 10**6)), FanOut(dispatcher, telemetry, split_tokens=1), telemetry)
            prompts = Prompts([1], [[place] for place in range(2, 10)], wire.Labels([3]))
            scores = await scorer.score(pool.model(None), prompts, CachePolicy())
            assert [len(engine.scores) for engine in engines] == [1, 1], "one request in two parts"
            assert scores.queue_seconds == 1.5
            assert (await scorer.score(pool.model(None), prompts, CachePolicy())).queue_seconds == 0, "all from the cache"
            values = await scorer.score(pool.model(None), Prompts([1], prompts.branches, wire.LengthValue()), CachePolicy())
            assert values.queue_seconds == 1.5


class Waiters:
    """Requests in a room of four places, until :meth:`open`."""

    def __init__(self) -> None:
        self.room, self.opened = WaitingRoom(4), asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, *names: str, weight: float = 1.0) -> None:
        """A request of the tenant that is the first letter of each name."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self.room.wait(self.opened.wait, wire.Caller("", name[0], weight)))
        await asyncio.sleep(0.01)

    @property
    def inside(self) -> list[str]:
        return [name for name, task in self.tasks.items() if not task.done()]


async def test_a_key_that_floods_keeps_no_other_out() -> None:
    waiters = Waiters()
    await waiters.enter("a1", "a2", "a3", "a4", "a5")
    assert waiters.inside == ["a1", "a2", "a3", "a4"]
    await waiters.enter("b1", "b2", "b3")
    assert waiters.inside == ["a1", "a2", "b1", "b2"], "the newest of the key with the most give way, until both have as many"
    await waiters.enter("a6", "c1", "c2")
    assert waiters.inside == ["a1", "b1", "b2", "c1"]
    await waiters.enter("d1")
    assert waiters.inside == ["a1", "b1", "c1", "d1"]
    await waiters.enter("e1", "a7")
    assert waiters.inside == ["a1", "b1", "c1", "d1"], "no key has more than one"
    assert waiters.room.waiting == 4
    waiters.opened.set()
    await asyncio.gather(*waiters.tasks.values())
    assert waiters.room.waiting == 0
    assert not waiters.room._tenants


async def test_places_follow_weights() -> None:
    waiters = Waiters()
    await waiters.enter("a1", "a2", "a3", "a4")
    await waiters.enter("b1", "b2", "b3", "b4", weight=3)
    assert waiters.inside == ["a1", "b1", "b2", "b3"]
    waiters.opened.set()


async def test_a_request_that_leaves_frees_its_place() -> None:
    waiters = Waiters()
    await waiters.enter("a1", "a2", "b1", "b2")
    waiters.tasks["a1"].cancel()
    await waiters.enter("c1", "c2")
    assert waiters.inside == ["a2", "b1", "b2", "c1"]
    waiters.opened.set()
    await asyncio.gather(*waiters.tasks.values(), return_exceptions=True)
    assert waiters.room.waiting == 0


def test_a_flood_while_no_engine_is_ready_keeps_no_other_key_out(start: Start, tmp_path: Path) -> None:
    engine = FakeEngine()
    file = write(tmp_path / "keys", entry("flood"), entry("other"))
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
            others = [post("other", path) for path in BODIES]
            await until(lambda: sum(task.done() for task in flood) == 26)
            assert metric_of(await asking.get("/metrics"), "yardstick_requests_waiting") == 8
            engine.ready = True
            assert [(await task).status_code for task in others] == [200] * 4
            statuses = [(await task).status_code for task in flood]
            assert statuses.count(200) == 4
            assert statuses.count(503) == 26

    asyncio.run(scenario())


def metric_of(answer: httpx.Response, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in answer.text.splitlines() if line.startswith(f"{name} "))


HEADERS: list[tuple[list[str], CachePolicy]] = [
    ([], CachePolicy()),
    (["max-age=0"], CachePolicy()),
    (["no-cache"], CachePolicy(read=False)),
    (["NO-STORE"], CachePolicy(read=False, write=False)),
    (["no-cache", "no-store"], CachePolicy(read=False, write=False)),
    (["no-cache , max-age=1"], CachePolicy(read=False)),
]


@pytest.mark.parametrize(("values", "policy"), HEADERS)
def test_headers_as_policies(values: list[str], policy: CachePolicy) -> None:
    connection = SimpleNamespace(scope={"headers": [(b"cache-control", value.encode()) for value in values]})
    assert CachePolicy.of(connection) == policy  # type: ignore[arg-type]
