"""Which replica gets what: load, affinity, ejection, engines that come back as something else, and how score requests are split."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import LIMITS, FakeEngine, logprobs_after, served
from tests.gateway.conftest import Clock, Start, metric
from tests.processes import free_port, wait_until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.pool.client import EngineClient
from yardstick_llm.gateway.pool.placement import parts_of, split
from yardstick_llm.gateway.pool.replica import Health, Replica, ServedModel

INFO = wire.Info("m", "1", 300, 1000, [1], ["score"], LIMITS)


def replica(name: int, tokens: int = 0) -> Replica:
    client = EngineClient(f"http://engine-{name}", connect_seconds=1, engine_seconds=1)
    return Replica(client, ready=True, tokens=tokens, health=Health(tolerance=1, seconds=60))


def model(*replicas: Replica) -> ServedModel:
    return ServedModel(INFO, None, None, list(replicas))


def test_a_prefix_stays_where_it_is() -> None:
    replicas = [replica(name) for name in range(8)]
    whole, fewer = model(*replicas), model(*replicas[1:])
    prefixes = [str(number).encode() for number in range(400)]
    before = {prefix: whole.choose(1, prefix) for prefix in prefixes}
    shares = Counter(before.values())
    assert all(25 <= shares[each] <= 80 for each in replicas), "even shares"
    for prefix in prefixes:
        if before[prefix] is not replicas[0]:
            assert fewer.choose(1, prefix) is before[prefix], "only the requests of the replica that went have moved"


def test_affinity_gives_way_to_load() -> None:
    pool = model(*map(replica, range(4)))
    chosen = []
    for _ in range(400):
        chosen.append(pool.choose(100, b"hot"))
        chosen[-1].tokens += 100
    loads = sorted(each.tokens for each in pool.replicas)
    assert loads[-1] <= 1.25 * sum(loads) / 4 + 100
    assert chosen[0] is chosen[1]


def test_no_more_than_half_are_ejected() -> None:
    replicas = [replica(name) for name in range(5)]
    pool = model(*replicas)
    for failed in replicas[:2]:
        assert failed.health.failed()
    assert pool.usable == replicas[2:]
    for failed in replicas[2:]:
        failed.health.failed()
    assert len(pool.usable) == 3
    assert [each.state for each in replicas] == ["ejected"] * 5
    alone = model(replicas[0])
    assert alone.choose(1) is replicas[0], "the only one is never left alone"


@pytest.fixture
def health_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which replicas are ejected."""
    clock = Clock()
    monkeypatch.setattr("yardstick_llm.gateway.pool.replica.monotonic", clock.monotonic)
    return clock


def test_one_trial_at_a_time(health_clock: Clock) -> None:
    health = Health(tolerance=2, seconds=10)
    assert not health.failed()
    assert health.failed()
    assert health.ejected
    sick = replica(0)
    sick.health = health
    pool = model(sick, replica(1, tokens=100))
    assert pool.usable == pool.replicas[1:]
    health_clock.now += 13
    assert (sick.state, pool.choose(1)) == ("half_open", sick)
    with sick.busy(1):
        assert pool.usable == pool.replicas[1:]
    assert health.failed(), "a failed trial ejects at once"
    health_clock.now += 13
    assert health.ejected, "and for longer"
    health.succeeded()
    assert sick.state == "ready"


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=200),
    prefix=st.integers(0, 3000),
    replicas=st.integers(1, 8),
    split_tokens=st.integers(1, 4000),
    most=st.integers(1, 64),
    idle=st.integers(0, 8),
    idle_split_tokens=st.integers(1, 4000),
)
def test_splits(
    lengths: list[int], prefix: int, replicas: int, split_tokens: int, most: int, idle: int, idle_split_tokens: int
) -> None:
    idle, idle_split_tokens = min(idle, replicas), min(idle_split_tokens, split_tokens)
    count = parts_of(prefix, sum(lengths), usual=split_tokens, idle=idle_split_tokens, replicas=replicas, idle_replicas=idle)
    parts = split(prefix, lengths, count, max_branches=most)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and 0 < len(part) <= most for part in parts)
    if most >= len(lengths):
        sums = [sum(lengths[place] for place in part) for part in parts]
        assert len(parts) <= replicas
        assert max(sums) - min(sums) <= max(lengths)
        least = idle_split_tokens if len(parts) <= idle else split_tokens
        assert len(parts) == 1 or sum(lengths) >= len(parts) * max(least, prefix)


def test_a_lone_request_uses_all_idle_engines(start: Start) -> None:
    """While engines compute something else, a request of this size goes to one."""
    engines = [FakeEngine() for _ in range(2)]
    client = start(*engines, idle_split_tokens=100)
    items = [[place % 250] * 30 for place in range(10)]

    def ask(query: int) -> None:
        body = {"query": [query] * 20, "items": items, "label_token_ids": [1]}
        assert len(client.post("/v1/score", json=body).json()["scores"]) == 10

    ask(7)
    assert [[len(score.branches) for score in engine.scores] for engine in engines] == [[5], [5]]
    for engine in engines:
        engine.faults.hold = True
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, 8)]
        try:
            wait_until(lambda: all(engine.running for engine in engines))
            asked.append(pool.submit(ask, 9))
            wait_until(lambda: sum(len(engine.scores) for engine in engines) == 5)
        finally:
            for engine in engines:
                engine.faults.hold = False
    assert all(each.result() is None for each in asked)
    assert sorted(len(score.branches) for engine in engines for score in engine.scores) == [5, 5, 5, 5, 10]


def test_queries_keep_to_a_replica(start: Start) -> None:
    engines = [FakeEngine() for _ in range(3)]
    client = start(*engines, hedge_budget=0)  # which computes late ones twice, such as those of a busy machine
    for query in range(30):  # with 12, one start in 40 leaves a replica without a query
        for item in range(3):
            body = {"query": [query] * 20, "items": [[item]], "label_token_ids": [1]}
            assert client.post("/v1/score", json=body).status_code == 200
    homes = [{score.prefix[0] for score in engine.scores} for engine in engines]
    assert sum(map(len, homes)) == 30, "no query was computed on two replicas"
    assert all(homes)


def test_generations_of_one_prefix_keep_to_a_replica(start: Start) -> None:
    """One after another they all reach the engine that has the prefix; prefixes are spread over the engines."""
    engines = [FakeEngine() for _ in range(3)]
    client = start(*engines)
    for prefix in range(20):
        for turn in range(4):
            body = {"prompt": [prefix] * 64 + [turn] * (1 + turn), "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
    homes = [{generate.prompt[0] for generate in engine.generates} for engine in engines]
    assert sum(map(len, homes)) == 20, "no prefix was computed on two replicas"
    assert all(homes)


def test_a_generation_joins_another_only_where_its_prompt_is_long(start: Start) -> None:
    """Beside an idle engine, one with a stream still gets a prompt that is longer than the load, and no short one."""
    engines = [FakeEngine() for _ in range(2)]
    client = start(*engines)

    def ask(length: int, most: int = 2) -> int:
        return client.post("/v1/completions", json={"prompt": [7] * length, "max_tokens": most}).status_code

    assert ask(70) == 200
    (home,) = [engine for engine in engines if engine.generates]
    (other,) = [engine for engine in engines if engine is not home]
    home.frozen = True
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, 70, 300)]
        try:
            wait_until(lambda: len(home.running) == 1)
            assert ask(71) == 200
            assert [len(generate.prompt) for generate in other.generates] == [71]
            asked.append(pool.submit(ask, 600))
            wait_until(lambda: len(home.running) == 2)
        finally:
            home.frozen = False
        assert [each.result() for each in asked] == [200, 200]


@pytest.mark.parametrize("count", [1, 4])
def test_fan_out(start: Start, count: int) -> None:
    """500 items keep four engines busy at the same time, each with a quarter of them."""
    items = [[place % 250, place // 250] for place in range(500)]
    engines = [FakeEngine(limits=wire.Limits(512, 2048, 20, 16, 8)) for _ in range(count)]
    client = start(*engines, split_tokens=100)
    for engine in engines:
        engine.faults.hold = True
    with ThreadPoolExecutor(1) as pool:
        body = {"query": [7] * 20, "items": items, "label_token_ids": [1, 2]}
        asked = pool.submit(lambda: client.post("/v1/score", json=body).json())
        try:
            wait_until(lambda: all(engine.running for engine in engines))
        finally:
            for engine in engines:
                engine.faults.hold = False
        answer = asked.result()
    assert [[len(score.branches) for score in engine.scores] for engine in engines] == [[500 // count]] * count
    rows = [logprobs_after([7] * 20 + item, engines[0].vocab_size) for item in (items[0], items[-1])]
    weights = [[2.718281828459045 ** row[label] for label in (1, 2)] for row in rows]
    assert [answer["scores"][0], answer["scores"][-1]] == [pytest.approx(weight) for weight in weights]


def test_only_the_failed_part_is_sent_again(start: Start) -> None:
    engines = [FakeEngine() for _ in range(4)]
    engines[0].faults.break_after = 0
    client = start(*engines, split_tokens=1)
    items = [[place] for place in range(40)]
    answer = client.post("/v1/score", json={"query": [1], "items": items, "label_token_ids": [1]}).json()
    assert len(answer["scores"]) == 40
    computed = Counter(tuple(branch) for engine in engines[1:] for score in engine.scores for branch in score.branches)
    assert computed == Counter(map(tuple, items)), "what had succeeded was not computed again"
    assert len(engines[0].scores) == 1
    assert all(score.deadline == 600 for engine in engines for score in engine.scores)
    assert metric(client, 'yardstick_engine_retries_total{code="engine_lost",model="fake"}') == 1


def test_a_replica_that_fails_is_left_alone(start: Start, health_clock: Clock) -> None:
    engines = [FakeEngine(), FakeEngine()]
    client = start(*engines)
    engines[0].faults.break_after = 0
    place = 0

    def ask(times: int) -> None:
        nonlocal place
        for _ in range(times):
            place += 1
            body = {"query": [place // 200 + 1], "items": [[place % 200]], "label_token_ids": [1]}
            assert client.post("/v1/score", json=body).status_code == 200

    ask(30)
    assert len(engines[0].scores) == 3
    assert metric(client, 'yardstick_engine_ejections_total{model="fake"}') == 1
    assert metric(client, 'yardstick_engines{model="fake",state="ejected"}') == 1
    engines[0].faults.break_after = None
    health_clock.now += 13
    assert metric(client, 'yardstick_engines{model="fake",state="half_open"}') == 1
    ask(20)
    assert len(engines[0].scores) > 4
    assert metric(client, 'yardstick_engines{model="fake",state="ready"}') == 2


def test_requests_wait_for_an_engine(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, wait_seconds=10)
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=20) as asking:
            score = asyncio.create_task(asking.post("/v1/score", json={"query": [1], "items": [[2]], "label_token_ids": [1]}))
            text = asyncio.create_task(asking.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
            await asyncio.to_thread(wait_until, lambda: metric(client, "yardstick_requests_waiting") == 2)
            assert metric(client, 'yardstick_model_requests_waiting{model="fake"}') == 2
            assert metric(client, 'yardstick_model_requests_without_engine_total{model="fake"}') == 2
            engine.ready = True
            assert [(await score).status_code, (await text).status_code] == [200, 200]

    asyncio.run(scenario())
    assert metric(client, "yardstick_requests_waiting") == 0


def test_engines_are_told_who_asks(start: Start, tmp_path: Path) -> None:
    engine = FakeEngine(token="first")
    file = tmp_path / "token"
    file.write_text("first\n")
    client = start(engine, engine_token_file=file)
    body = {"query": [1], "items": [[2]], "label_token_ids": [1]}
    assert client.post("/v1/score", json=body).status_code == 200
    engine.token = "second"
    refused = client.post("/v1/score", json={**body, "items": [[3]]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    (tmp_path / "new").write_text("second")
    (tmp_path / "new").rename(file)
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert client.post("/v1/score", json={**body, "items": [[4]]}).status_code == 200


IDS = {"query": [1], "items": [[2]], "label_token_ids": [1]}


@pytest.fixture
def port() -> int:
    return free_port()


def test_an_engine_may_go_and_come_back_as_another_model(start: Start, port: int) -> None:
    old, new = FakeEngine(model="old"), FakeEngine(model="new", fingerprint="fake-2")
    url = f"http://127.0.0.1:{port}"
    client = start(wait=False, engines=(url,))
    assert client.post("/v1/score", json=IDS).status_code == 503
    with served(old, port):
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert client.post("/v1/score", json=IDS).json()["model"] == "old"
    gone = client.post("/v1/score", json={**IDS, "items": [[3]]})
    assert (gone.status_code, gone.json()["error"]["code"]) in [(503, "not_ready"), (502, "engine_lost")]
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    with served(new, port):
        wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
        assert client.post("/v1/score", json={**IDS, "model": "new"}).json()["model"] == "new"
        assert client.post("/v1/score", json={**IDS, "model": "old"}).status_code == 404
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["new"]


def test_replicas_that_differ_are_not_mixed(start: Start) -> None:
    """Two versions of a model: every request is answered by the one with more replicas, so results are never mixed."""
    engines = [FakeEngine(fingerprint="v1"), FakeEngine(fingerprint="v2"), FakeEngine(fingerprint="v2")]
    client = start(*engines)
    assert metric(client, "yardstick_engines_ready") == 3
    for place in range(6):
        client.post("/v1/score", json={**IDS, "items": [[place]]})
    assert engines[0].scores == []
    assert len(engines[1].scores + engines[2].scores) == 6
    engines[1].ready = engines[2].ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert client.post("/v1/score", json=IDS).headers["x-yardstick-cache"] == "0/1"
    assert engines[0].scores
