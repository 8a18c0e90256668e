"""Finding engines, and what is made of those that speak no sense, go away, or come back as something else."""

from __future__ import annotations

import pytest

from tests.fakes import FakeEngine, served
from tests.gateway.conftest import Start, metric
from tests.processes import free_port, wait_until

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
