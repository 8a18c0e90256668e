"""A server without keys and the web pages that reach it; CORS."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import entry, write

SCORE = {"query": [1], "items": [[2]], "label_token_ids": [1]}
PAGE = "https://app.example"


def error(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return answer.status_code, answer.json()["error"]["code"]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.json", entry("k"))


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.10", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]"]
)
def test_names_of_this_machine(shared: httpx.Client, host: str) -> None:
    assert shared.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]",
        "[::1",
        "::1",
        "2130706433",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/livez", "/schema", "/nowhere"])
def test_names_of_others(shared: httpx.Client, host: str, path: str) -> None:
    assert error(shared.get(path, headers={"host": host})) == (421, "host_not_allowed")


def test_more_names_can_be_allowed(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, allowed_hosts=("Rankers.test",))
    assert client.get("/v1/models", headers={"host": "rankers.TEST:80"}).status_code == 200
    assert error(client.get("/v1/models", headers={"host": "x.rankers.test"})) == (421, "host_not_allowed")
    assert metric(client, 'yardstick_rejected_requests_total{reason="host"}') == 1


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "http://localhost"}, False),
        ({"origin": "null"}, False),
        ({"origin": PAGE}, False),
        ({"origin": PAGE, "sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        ({}, True),
    ],
)
def test_pages_of_other_origins(shared: httpx.Client, headers: dict[str, str], allowed: bool) -> None:
    answer = shared.post("/v1/score", json=SCORE, headers=headers | {"host": "localhost:8000"})
    if allowed:
        assert answer.status_code == 200
    else:
        assert error(answer) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


def test_with_keys_the_key_protects(start: Start, key_file: Path) -> None:
    engine = FakeEngine()
    client = start(engine, api_keys_file=key_file)
    headers = {"authorization": "Bearer k", "host": "api.example", "origin": PAGE, "content-type": "text/plain"}
    answer = client.post("/v1/score", content=json.dumps(SCORE), headers=headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
def test_cors(start: Start, key_file: Path, keyed: bool, origins: tuple[str, ...]) -> None:
    engine = FakeEngine()
    client = start(engine, cors_origins=origins, api_keys_file=key_file if keyed else None)
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = client.options("/v1/score", headers={"origin": PAGE} | asked)
    assert preflight.status_code == 204, preflight.text
    for method, path in (("PUT", "/v1/catalogues/a"), ("DELETE", "/v1/responses/a")):
        others = client.options(path, headers={"origin": PAGE, "access-control-request-method": method})
        assert others.status_code == 204, others.text
    told = "*" if origins == ("*",) else PAGE
    assert preflight.headers["access-control-allow-origin"] == told
    assert {"authorization", "content-type"} <= set(preflight.headers["access-control-allow-headers"].lower().split(", "))
    headers = {"origin": PAGE} | ({"authorization": "Bearer k"} if keyed else {})
    answer = client.post("/v1/score", json=SCORE, headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, told)
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert {"x-request-id", "x-yardstick-cache", "x-ratelimit-remaining-tokens", "retry-after", "retry-after-ms"} <= exposed
    assert {"x-yardstick-fallback", "x-yardstick-truncated"} <= exposed
    missing = client.post("/v1/score", json={}, headers=headers)
    assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (400, told), "scripts can read errors"
    if origins != ("*",):
        other = client.options("/v1/score", headers={"origin": "https://other.example"} | asked)
        assert error(other) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in other.headers
