"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: all engines, failures, joining engines, keys, floods and Redis."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, Running, adapter, stop
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import by, entry, write
from tests.gateway.pool.test_using_adapters import BLUE, GREEN, RED, engine, expected, knows, models, score
from tests.processes import wait_until
from tests.redis import RedisServer
from yardstick_llm.engine import wire
from yardstick_llm.gateway.pool import loading
from yardstick_llm.gateway.pool.loading import MOST_OPERATIONS

FILES = {"red": RED, "blue": BLUE, "green": GREEN}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "REREAD_SECONDS", 0.1)
    monkeypatch.setattr(loading, "FIRST_PAUSE_SECONDS", 0.1)


def able(model: str = "one", *adapters: wire.Adapter) -> FakeEngine:
    return engine(model, *adapters, loadable=dict(FILES))


def load(client: httpx.Client, name: str, path: str = "", **body: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path or name} | body)


def unload(client: httpx.Client, name: str, **body: Any) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name} | body)


def test_an_adapter_is_loaded_on_all_engines_and_unloaded(start: Start) -> None:
    first, second = able(), able()
    client = start(first, second)
    answer = load(client, "red")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "object": "lora_adapter",
        "id": "red",
        "parent": "one",
        "digest": RED.digest,
        "engines": 2,
        "failed": [],
    }
    assert score(client, "red").json()["scores"] == expected(RED.digest)  # at once
    assert first.adapters.keys() == second.adapters.keys() == {"red"}
    assert load(client, "red").status_code == 200  # equal files again
    assert unload(client, "red").json()["engines"] == 2
    assert score(client, "red").json()["error"]["code"] == "model_not_found"
    assert not first.adapters
    assert not second.adapters
    assert unload(client, "red").status_code == 404
    assert metric(client, 'yardstick_adapter_operations_total{operation="load",result="done"}') == 4


def test_another_adapter_of_the_name_needs_load_inplace(start: Start) -> None:
    one = able()
    client = start(one)
    load(client, "red").raise_for_status()
    assert score(client, "red").json()["scores"] == expected(RED.digest)
    refused = load(client, "red", "green")
    assert refused.status_code == 400
    assert one.adapters["red"].digest == RED.digest
    replaced = load(client, "red", "green", load_inplace=True)
    assert replaced.json()["digest"] == GREEN.digest
    assert score(client, "red").json()["scores"] == expected(GREEN.digest)  # not the cached ones
    assert models(client)["red"]["digest"] == GREEN.digest


def test_a_load_that_no_engine_takes_changes_nothing(start: Start) -> None:
    first, second = able(), able()
    client = start(first, second, aliases=("nick=one",))
    for name, path, status in (
        ("red", "/etc", 400),
        ("red", "../../red", 400),
        ("red", "", 400),
        ("a:b", "red", 400),
        ("one", "red", 400),
        ("nick", "red", 400),
        ("../red", "red", 400),
        ("r\u00e9d", "red", 400),
        ("red\n", "red", 400),
        ("x" * 129, "red", 400),
        ("red", "red\u0000", 400),
        ("red", "x" * 5000, 400),
    ):
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert answer.status_code == status, (name, path, answer.text)
        assert "Traceback" not in answer.text
    assert client.post("/v1/load_lora_adapter", content=b"{" + b" " * 20_000).status_code == 413
    assert client.post("/v1/load_lora_adapter", content=b"[]").status_code == 400
    assert load(client, "red", model="two").status_code == 404
    assert not first.adapters
    assert not second.adapters
    assert {each.path for each in first.loads} == {"/etc", "../../red"}  # engines check paths; the rest never reaches them
    assert set(models(client)) == {"one", "nick"}
    first.max_adapters = second.max_adapters = 0
    wait_until(lambda: load(client, "red", "/etc").json()["error"]["param"] == "model")


def test_a_partial_failure_is_reported_and_tried_again(start: Start) -> None:
    first, second = able(), able()
    client = start(first, second)
    second.faults.adapter_fail = wire.Failed("", "out_of_memory", "There is no memory for another adapter.")
    answer = load(client, "red")
    assert (answer.status_code, answer.json()["engines"]) == (202, 1)
    assert answer.json()["failed"] == [{"engine": second.url, "message": "There is no memory for another adapter."}]
    assert score(client, "red").status_code == 200
    second.faults.adapter_fail = None
    wait_until(lambda: "red" in second.adapters)
    first.faults.adapter_fail = wire.Failed("", "internal", "The engine is confused.")
    answer = unload(client, "red")
    assert (answer.status_code, answer.json()["engines"], len(answer.json()["failed"])) == (202, 1, 1)
    first.faults.adapter_fail = None
    wait_until(lambda: not first.adapters)
    wait_until(lambda: score(client, "red").status_code == 404)


def test_different_files_on_engines_are_a_failure(start: Start) -> None:
    first, second, third = able(), able(), able()
    third.loadable["red"] = BLUE
    client = start(first, second, third)
    answer = load(client, "red")
    assert (answer.status_code, answer.json()["digest"], answer.json()["engines"]) == (202, RED.digest, 2)
    assert [each["engine"] for each in answer.json()["failed"]] == [third.url]
    for place in range(6):
        scores = score(client, "red", query=[place]).json()["scores"]
        assert scores == expected(RED.digest, [[place, 4], [place, 5, 6]])


def test_an_engine_that_joins_gets_what_was_loaded(start: Start) -> None:
    first, second = able(), able()
    second.ready = False
    client = start(first, second, wait=False)
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert load(client, "red").json()["engines"] == 1
    second.ready = True
    wait_until(lambda: "red" in second.adapters)
    first.ready = False
    first.adapters = {}  # a new process
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert score(client, "red").status_code == 200
    first.ready = True
    wait_until(lambda: "red" in first.adapters)
    wait_until(lambda: metric(client, 'yardstick_adapter_operations_total{operation="restore",result="done"}') == 2)
    second.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    unload(client, "red").raise_for_status()
    second.ready = True  # it still has the adapter
    wait_until(lambda: not second.adapters)


def keys(folder: Path) -> Path:
    entries: list[dict[str, Any]] = [
        {"name": "admin", "admin": True},
        {"name": "all"},
        {"name": "base", "models": ["one"]},
        {"name": "short", "models": ["red"]},
        {"name": "long", "models": ["one:red"]},
        {"name": "any", "models": ["one:*"]},
        {"name": "nick", "models": ["nick:*"]},
        {"name": "slow", "admin": True, "requests_per_minute": 2},
    ]
    return write(folder / "keys.json", *(entry(**each) for each in entries))


def as_key(client: httpx.Client, key: str) -> httpx.Client:
    client.headers.update(by(key))
    return client


def test_only_admin_keys_load_and_unload(start: Start, tmp_path: Path) -> None:
    one = able("one", RED)
    client = start(one, api_keys_file=keys(tmp_path))
    for key in ("all", "base", "any", "none"):
        as_key(client, key)
        for answer in (load(client, "blue"), load(client, "red", "green", load_inplace=True), unload(client, "red")):
            assert answer.status_code == (401 if key == "none" else 403)
    assert not one.loads
    assert not one.unloads
    assert one.adapters == {"red": RED}
    as_key(client, "admin")
    assert load(client, "blue").status_code == 200
    as_key(client, "slow")
    assert [load(client, "blue").status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.slow
def test_keys_may_be_limited_to_adapters(start: Start, tmp_path: Path) -> None:
    client = start(able("one", RED, BLUE), api_keys_file=keys(tmp_path), aliases=("nick=one",))
    as_key(client, "all")
    knows(client, "red", "blue")
    allowed = {
        "all": {"one", "nick", "red", "blue"},
        "base": {"one", "nick"},
        "short": {"red"},
        "long": {"red"},
        "any": {"red", "blue"},
        "nick": set[str](),
    }
    usable = ("one", "nick", "red", "one:red", "nick:red", "blue", "one:blue", "nick:blue", "one:*", "nick:*", "red:*")
    for key, seen in allowed.items():
        as_key(client, key)
        assert models(client).keys() == seen, key
        used = {name for name in usable if score(client, name).status_code == 200}
        qualified = {f"{base}:{name}" for name in seen & {"red", "blue"} for base in ("one", "nick")}
        assert used == (seen | qualified if key != "nick" else {"nick:red", "nick:blue"}), key
        for name in set(usable) - used:
            assert score(client, name).json()["error"]["code"] == "model_not_found"
    as_key(client, "short")
    assert score(client, None).json()["model"] == "red"  # type: ignore[arg-type]
    as_key(client, "any")
    assert score(client, None).status_code == 400  # type: ignore[arg-type]


def test_floods_of_loads_are_bounded(start: Start) -> None:
    one = able()
    one.loadable |= {f"a{place}": adapter(f"{place:04x}") for place in range(40)}
    one.faults.adapter_delay = 0.3
    client = start(one)
    with ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(lambda place: load(client, f"a{place}"), range(40)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    assert len(one.loads) == statuses.count(200) == len(one.adapters) <= 3 * MOST_OPERATIONS
    with ThreadPoolExecutor(8) as threads:
        same = list(threads.map(lambda _: load(client, "red"), range(8)))
    assert {answer.status_code for answer in same} == {200, 409}
    assert all("retry-after" in answer.headers for answer in same if answer.status_code == 409)
    assert score(client, "one").status_code == 200


def test_the_number_of_remembered_adapters_is_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MOST_KEPT", 1)
    client = start(able())
    load(client, "red").raise_for_status()
    refused = load(client, "blue")
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "store_full")
    unload(client, "red").raise_for_status()
    assert load(client, "blue").status_code == 200


def test_loading_ends_also_if_the_client_leaves(start: Start) -> None:
    one = able()
    one.faults.adapter_delay = 0.3
    client = start(one)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/load_lora_adapter", json={"lora_name": "red", "lora_path": "red"}, timeout=0.1)
    wait_until(lambda: "red" in one.adapters)
    wait_until(lambda: "red" in models(client))


@pytest.mark.slow
def test_unloading_races_with_requests(start: Start) -> None:
    first, second = able(), able()
    client = start(first, second)
    end, statuses, wrong = threading.Event(), set(), []

    def ask(thread: int) -> None:
        place = 0
        while not end.is_set():
            place += 1
            answer = score(client, "red", query=[thread, place % 20], items=[[4]], label_token_ids=[7])
            statuses.add(answer.status_code)
            valid = [expected(version.digest, [[thread, place % 20, 4]], [7]) for version in (RED, GREEN)]
            if answer.status_code == 200 and answer.json()["scores"] not in valid:
                wrong.append(answer.text)

    threads = [threading.Thread(target=ask, args=[each]) for each in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        load(client, "red").raise_for_status()
        end.wait(0.05)
        load(client, "red", "green", load_inplace=True).raise_for_status()
        end.wait(0.05)
        unload(client, "red").raise_for_status()
    end.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert {200, 404} <= statuses <= {200, 404, 503}
    assert score(client, "red").status_code == 404


def test_gateways_share_what_was_loaded(start: Start, redis: RedisServer) -> None:
    one = able()
    client = start(one, redis_url=redis.url)
    load(client, "red").raise_for_status()
    late = able()
    server = Running(late)
    late.url = server.url
    try:
        other = start(wait=False, engines=(late.url, one.url), redis_url=redis.url)
        wait_until(lambda: metric(other, "yardstick_engines_ready") == 2)
        wait_until(lambda: "red" in late.adapters)
        knows(other, "red")
        unload(other, "one:red").raise_for_status()
        assert not one.adapters
        assert not late.adapters
        wait_until(lambda: score(client, "red", query=[9]).status_code == 404)
        redis.pause()
        assert load(client, "blue").status_code == 503
        assert not one.adapters
    finally:
        redis.resume()
        stop([server])


def test_an_unload_through_another_gateway_is_a_404_at_once(
    start: Start, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the next reading of Redis nor the next probe is due: the engine's refusal tells the gateway."""
    one = able()
    client = start(one, redis_url=redis.url, probe_seconds=600.0, wait_seconds=60.0)
    load(client, "red").raise_for_status()
    assert score(client, "red").status_code == 200
    monkeypatch.setattr(loading, "REREAD_SECONDS", 600.0)
    other = start(wait=False, engines=(one.url,), redis_url=redis.url)
    knows(other, "red")
    unload(other, "red").raise_for_status()
    answer = score(client, "red", query=[9])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), answer.text
    assert "red" not in models(client)
