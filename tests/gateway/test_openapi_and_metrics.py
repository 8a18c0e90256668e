"""The API's description, the page that shows it, and the metrics."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from gateway.openapi import as_openapi_3_0
from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metric


def test_the_document_describes_requests_answers_and_errors(shared: httpx.Client) -> None:
    document = shared.get("/schema/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for path, request, answer in (
        ("/v1/score", "ScoreRequest", "ScoreResponse"),
        ("/v1/completions", "CompletionRequest", "Completion"),
        ("/v1/chat/completions", "ChatRequest", "ChatCompletion"),
        ("/v1/length", "LengthRequest", "LengthResponse"),
    ):
        operation = document["paths"][path]["post"]
        assert operation["description"]
        assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{request}"}
        assert answer_of(operation, "200") == {"$ref": f"#/components/schemas/{answer}"}
        for status in ("400", "401", "404", "413", "429", "503"):
            assert answer_of(operation, status) == {"$ref": "#/components/schemas/ErrorBody"}
    assert schemas["ScoreRequest"]["required"] == ["items", "query"]
    assert schemas["ScoreRequest"]["description"].startswith("Score every item")
    assert schemas["ScoreRequest"]["properties"]["labels"]["description"].startswith("The same as text")
    assert schemas["CompletionRequest"]["properties"]["top_k"]["description"].startswith("Draw from this many")
    guidance = schemas["LengthGuidance"]
    assert guidance["properties"]["constraint"]["description"].startswith("What the target means")
    assert '"centered_exp", "value_bias"' in json.dumps(guidance["properties"]["mode"])
    assert set(schemas["TopLogprob"]["required"]) == {"bytes", "logprob", "token"}
    assert {"/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/{model}"} < set(document["paths"])


def answer_of(operation: dict[str, Any], status: str) -> dict[str, Any]:
    return operation["responses"][status]["content"]["application/json"]["schema"]


def test_the_page_needs_no_other_server(shared: httpx.Client) -> None:
    page = shared.get("/schema")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3
    for path in loaded:
        assert path.startswith("/schema/assets/")
        assert len(shared.get(path).raise_for_status().content) > 10_000
    assert shared.get("/schema/assets/package.json").status_code == 404
    assert '"openapi":"3.0.3"' in page.text
    assert '"type":"null"' not in page.text


def test_openapi_3_0_has_other_words() -> None:
    schema = {
        "oneOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}],
        "x": [{"const": "a"}, {"type": ["string", "null"]}],
    }
    assert as_openapi_3_0(schema) == {
        "oneOf": [{"type": "integer", "minimum": 0, "exclusiveMinimum": True}],
        "nullable": True,
        "x": [{"enum": ["a"]}, {"oneOf": [{"type": "string"}], "nullable": True}],
    }


def test_metrics_count_what_happened(start: Start, engine: FakeEngine) -> None:
    client = start(engine)
    engine.says = ids("red")
    for _ in range(2):
        client.post("/v1/score", json={"query": [1, 2], "items": [[3], [4]], "label_token_ids": [1]})
    client.post("/v1/score", json={})
    client.post("/v1/completions", json={"prompt": [1, 2, 3]})
    client.get("/nowhere/at/all")
    for name, value in {
        'yardstick_requests_total{route="/v1/score",status="200"}': 2,
        'yardstick_requests_total{route="/v1/score",status="400"}': 1,
        'yardstick_requests_total{route="none",status="404"}': 1,
        'yardstick_request_seconds_count{route="/v1/score"}': 3,
        'yardstick_first_byte_seconds_count{route="/v1/completions"}': 1,
        'yardstick_items_total{model="fake",source="cache"}': 2,
        'yardstick_items_total{model="fake",source="engine"}': 2,
        'yardstick_tokens_total{kind="prompt",model="fake"}': 15,
        'yardstick_tokens_total{kind="prompt_cached",model="fake"}': 6,
        'yardstick_tokens_total{kind="completion",model="fake"}': len(engine.says) + 1,
        "yardstick_engines_ready": 1,
        "yardstick_requests_in_flight": 1,
    }.items():
        assert metric(client, name) == value, name
    engine.faults.garbage = True
    client.post("/v1/completions", json={"prompt": [1]})
    assert metric(client, 'yardstick_engine_errors_total{code="engine_lost"}') == 1
