"""``/health``, ``/ping`` and ``/version``, which clients of vLLM ask for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.answers import told
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import by, entry, write
from tests.processes import wait_until

SCORE = {"query": [1, 2], "items": [[3]], "label_token_ids": [5]}


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_has_no_body(shared: httpx.Client, path: str) -> None:
    for answer in (shared.get(path), shared.head(path)):
        assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "0")
    assert shared.post(path).status_code == 405


def test_a_gateway_is_ready_once_it_knows_a_model(start: Start) -> None:
    """And stays so while the engines are away: it answers from the cache, and other requests wait or get a 503 in words. Without
    ready gateways, clients of the Service would be refused the connection."""
    engine = FakeEngine()
    engine.ready = False
    client = start(engine, wait=False, wait_seconds=0.1)
    for path in ("/readyz", "/health", "/ping"):
        answer = client.get(path)
        assert (answer.status_code, told(answer)["code"]) == (503, "not_ready")
    assert (client.head("/ping").status_code, client.head("/ping").content) == (503, b"")
    unready = client.post("/v1/score", json=SCORE)
    assert (unready.status_code, told(unready)["code"], int(unready.headers["retry-after"]) >= 1) == (503, "not_ready", True)
    assert (client.get("/livez").text, client.get("/v1/models").json()["data"]) == ("ok", [])
    engine.ready = True
    wait_until(lambda: client.get("/readyz").status_code == 200)
    wait_until(lambda: metric(client, 'yardstick_model_engines_ready{model="fake"}') == 1)
    assert client.post("/v1/score", json=SCORE).status_code == 200
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    assert 'yardstick_model_engines_ready{model="fake"} 0.0' in client.get("/metrics").text
    for path in ("/readyz", "/health", "/ping"):
        assert client.get(path).status_code == 200
    assert client.post("/v1/score", json=SCORE).headers["x-yardstick-cache"] == "1/1"
    waited = client.post("/v1/score", json=SCORE | {"items": [[9]]})
    assert (waited.status_code, told(waited)["code"]) == (503, "not_ready")


def test_health_and_version_need_no_key_and_no_place(start: Start, tmp_path: Path) -> None:
    engine = FakeEngine()
    client = start(engine, api_keys_file=write(tmp_path / "keys.json", entry("secret")), max_in_flight=1)
    engine.faults.delay = 0.1
    body = {"prompt": "a", "stream": True, "max_tokens": 5, "ignore_eos": True}
    headers = by("secret")
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        for path, more in (("/tokenize", {"prompt": "a"}), ("/v1/score", SCORE)):
            refused = client.post(path, json=more, headers=headers)
            assert (refused.status_code, told(refused)["code"]) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
        for path in ("/livez", "/health", "/ping", "/version"):
            assert client.get(path).status_code == 200
        stream.read()
    assert client.post("/v1/score", json=SCORE, headers=headers).status_code == 200


def test_the_version(shared: httpx.Client) -> None:
    assert shared.get("/version").json() == {"version": version("yardstick-llm")}


def test_a_gateway_starts_in_a_checkout_that_is_not_installed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU host, which has the dependencies only."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("yardstick_llm.tracing.version.version", missing)
    client = start(FakeEngine())
    assert client.get("/version").json() == {"version": "unknown"}
