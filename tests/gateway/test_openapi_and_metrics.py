"""The API's description, the page that shows it, and the metrics, those of caches included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import by, entry, write
from tests.prefixes import PrefixCache
from tests.processes import wait_until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.ops.metrics import OTHER, ModelLabels


def test_the_document_describes_requests_answers_and_errors(shared: httpx.Client) -> None:
    document = shared.get("/schema/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for paths, name, answer in (
        ("/v1/rerank /rerank", "Rerank", "RerankResponse"),
        ("/v1/classify", "Classify", "ClassifyResponse"),
        ("/v1/embeddings", "Embeddings", "EmbeddingsResponse"),
        ("/v1/completions", "Completion", "Completion"),
        ("/v1/chat/completions", "Chat", "ChatCompletion"),
        ("/v1/responses", "Response", "ResponseBody"),
        ("/v1/length", "Length", "LengthResponse"),
        ("/tokenize /v1/tokenize", "Tokenize", "TokenizeResponse"),
        ("/detokenize /v1/detokenize", "Detokenize", "DetokenizeResponse"),
        ("/v1/load_lora_adapter", "LoadAdapter", "AdapterOperation"),
        ("/v1/unload_lora_adapter", "UnloadAdapter", "AdapterOperation"),
    ):
        for path in paths.split():
            operation = document["paths"][path]["post"]
            assert operation["description"]
            asked = operation["requestBody"]["content"]["application/json"]["schema"]
            assert asked == {"$ref": f"#/components/schemas/{name}Request"}
            assert answer_of(operation, "200") == {"$ref": f"#/components/schemas/{answer}"}
            for status in (400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 502, 503, 504):
                assert answer_of(operation, str(status)) == {"$ref": "#/components/schemas/ErrorBody"}
    score = document["paths"]["/v1/score"]["post"]
    assert score["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ScoreRequest"}
    assert {"$ref": "#/components/schemas/ScoreResponse"} in answer_of(score, "200")["oneOf"]
    assert schemas["ScoreRequest"]["description"].startswith("Score every item")
    assert schemas["ScoreRequest"]["properties"]["labels"]["description"].startswith("Texts to score")
    assert schemas["CompletionRequest"]["properties"]["top_k"]["description"].startswith("Draw from this many")
    guidance = schemas["LengthGuidance"]
    assert guidance["properties"]["constraint"]["description"].startswith("Meaning of the target")
    assert '"centered_exp", "value_bias"' in json.dumps(guidance["properties"]["mode"])
    assert set(schemas["TopLogprob"]["required"]) == {"bytes", "logprob", "token"}
    assert {"/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/{model}"} < set(document["paths"])
    assert {"/health", "/ping", "/version", "/tokenizer_info"} < set(document["paths"])
    (query,) = document["paths"]["/tokenizer_info"]["get"]["parameters"]
    assert (query["name"], query["in"], query.get("required", False)) == ("model", "query", False)


OPEN = {"/livez", "/readyz", "/health", "/ping", "/version", "/v1/cluster/auth", "/metrics"}
"""Operations that need no key."""


@pytest.mark.slow
def test_operations_need_a_key_but_for_those_of_operators(start: Start, shared: httpx.Client, tmp_path: Path) -> None:
    """Nothing else depends on the settings."""
    keys = write(tmp_path / "keys.json", entry("secret"))
    client = start(FakeEngine(), wait=False, api_keys_file=keys)
    document = client.get("/schema/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert "security" not in document
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation.get("security") == (None if path in OPEN else [{"key": []}]), path
            if "security" in operation:
                operation["security"] = [{"key": []}, {}]
    assert document == shared.get("/schema/openapi.json").json(), "without keys a key is optional"


def test_streams_and_response_headers_are_described(shared: httpx.Client) -> None:
    paths = shared.get("/schema/openapi.json").json()["paths"]
    typed = paths["/v1/responses"]["post"]["responses"]["200"]
    events = {each["$ref"].rpartition("/")[2] for each in typed["content"]["text/event-stream"]["schema"]["oneOf"]}
    assert {"StateEvent", "ItemEvent", "TextDelta", "ArgumentsDone"} < events
    assert "response.failed" in typed["description"]
    for path, event in (("/v1/chat/completions", "ChatChunk"), ("/v1/completions", "Completion")):
        answer = paths[path]["post"]["responses"]["200"]
        assert answer["content"]["text/event-stream"]["schema"] == {"$ref": f"#/components/schemas/{event}"}
        assert "data: [DONE]" in answer["description"]
    score = paths["/v1/score"]["post"]["responses"]
    assert set(score["200"]["content"]) == {"application/json"}
    assert {"x-request-id", "x-yardstick-cache", "x-yardstick-ignored", "x-ratelimit-remaining-items"} <= set(
        score["200"]["headers"]
    )
    assert all("x-request-id" in answer["headers"] for answer in score.values())
    assert "retry-after" in score["429"]["headers"]
    assert "x-yardstick-cache" not in paths["/v1/chat/completions"]["post"]["responses"]["200"]["headers"]


@pytest.mark.slow
def test_the_document_is_valid(shared: httpx.Client) -> None:
    document = shared.get("/schema/openapi.json").json()
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references == set(schemas) & references
    assert "ChatChunk" in references


def test_answers_are_what_the_document_says(shared: httpx.Client) -> None:
    document = shared.get("/schema/openapi.json").json()

    def check(path: str, body: dict[str, Any]) -> None:
        answer = shared.post(path, json=body)
        kind = answer.headers["content-type"].partition(";")[0]
        schema = document["paths"][path]["post"]["responses"][str(answer.status_code)]["content"][kind]["schema"]
        validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        texts = [answer.text] if kind == "application/json" else lines
        assert kind == "application/json" or path == "/v1/responses" or texts.pop() == "[DONE]"
        for text in texts:
            validator.validate(json.loads(text))

    check("/v1/score", {"query": [1], "items": [[2]], "label_token_ids": [1]})
    check("/v1/score", {"query": [1]})
    check("/v1/score", {"query": [1], "items": [], "label_token_ids": [1], "model": "other"})
    check("/v1/length", {"input": "a"})
    check("/v1/rerank", {"query": "a", "documents": ["b", "c"], "return_documents": True})
    check("/v1/rerank", {"query": "a", "documents": []})
    check("/v1/score", {"text_1": "a", "text_2": ["b", "c"]})
    check("/v1/classify", {"input": "a"})
    check("/v1/embeddings", {"input": "a"})
    check("/tokenize", {"prompt": "a"})
    check("/tokenize", {"prompt": "a", "return_token_strs": True})
    check("/v1/tokenize", {"prompt": 1})
    check("/detokenize", {"tokens": [5]})
    for stream in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": True} if stream else None
        streamed = {"stream": stream, "stream_options": options, "max_tokens": 3, "n": 2}
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
        check("/v1/chat/completions", chat | streamed)
        check("/v1/completions", {"prompt": "a", "logprobs": 2, "return_token_ids": True} | streamed)
        told = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3, "instructions": "b"}
        check("/v1/responses", {"input": "a", "stream": stream} | told)
    check("/v1/completions", {"prompt": "a", "prompt_logprobs": 2, "max_tokens": 1})
    check("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1, "max_tokens": 1})


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


def test_metrics_count_what_happened(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine)
    engine.says = ids("red")
    for _ in range(2):
        client.post("/v1/score", json={"query": [1, 2], "items": [[3], [4]], "label_token_ids": [1]})
    client.post("/v1/score", json={})
    client.post("/v1/score", json={"model": "unknown", "query": [1], "items": [[2]], "label_token_ids": [1]})
    client.post("/v1/completions", json={"prompt": [1, 2, 3]})
    client.post("/v1/completions", json={"prompt": [1, 2, 3], "stream": True})
    client.get("/nowhere/at/all")
    for name, value in {
        'yardstick_requests_total{model="fake",route="/v1/score",status="200"}': 2,
        'yardstick_requests_total{model="fake",route="/v1/score",status="400"}': 1,
        'yardstick_requests_total{model="",route="/v1/score",status="404"}': 1,
        'yardstick_requests_total{model="",route="none",status="404"}': 1,
        'yardstick_request_seconds_count{model="fake",route="/v1/score"}': 3,
        'yardstick_first_byte_seconds_count{model="fake",route="/v1/completions",stream="false"}': 1,
        'yardstick_first_byte_seconds_count{model="fake",route="/v1/completions",stream="true"}': 1,
        'yardstick_items_total{model="fake",source="cache"}': 2,
        'yardstick_items_total{model="fake",source="engine"}': 2,
        'yardstick_tokens_total{kind="prompt",model="fake"}': 18,
        'yardstick_tokens_total{kind="prompt_cached",model="fake"}': 6,
        'yardstick_tokens_total{kind="completion",model="fake"}': 2 * (len(engine.says) + 1),
        "yardstick_engines_ready": 1,
        "yardstick_requests_in_flight": 0,
    }.items():
        assert metric(client, name) == value, name
    engine.faults.garbage = True
    client.post("/v1/completions", json={"prompt": [1]})
    assert metric(client, 'yardstick_engine_errors_total{code="engine_lost",model="fake"}') == 1


def test_metrics_name_keys_and_engines_only_to_administrators(start: Start, tmp_path: Path) -> None:
    engine = FakeEngine()
    keys = write(tmp_path / "keys.json", entry("team-blue", requests_per_minute=2), entry("boss", admin=True))
    client = start(engine, api_keys_file=keys, usage_keys=8)
    body = {"query": [1, 2], "items": [[3], [4]], "label_token_ids": [1]}
    statuses = [client.post("/v1/score", json=body, headers=by("team-blue")).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    for headers in ({}, by("team-blue"), by("wrong"), {"authorization": "x" * 2000}):
        page = client.get("/metrics", headers=headers).raise_for_status().text
        assert "yardstick_engines_ready 1.0" in page
        assert "team-blue" not in page
        assert engine.url not in page
        assert "key=" not in page
    page = client.get("/metrics", headers=by("boss")).text
    for line in (
        'yardstick_limited_total{key="team-blue",limit="requests"} 1.0',
        'yardstick_key_requests_total{key="team-blue"} 3.0',
        f'yardstick_engine_requests_in_flight{{engine="{engine.url}",model="fake"}} 0.0',
    ):
        assert line in page.splitlines()
    shown = start(engine, api_keys_file=keys, metrics_names=True)
    assert engine.url in shown.get("/metrics").text


def test_usage_is_counted_by_key_up_to_a_number_of_keys(start: Start, tmp_path: Path) -> None:
    names = ("one", "two", "three", "four")
    keys = write(tmp_path / "keys.json", *map(entry, names))
    engine = FakeEngine(says=ids("red"))
    client = start(engine, api_keys_file=keys, usage_keys=2, metrics_names=True)
    body = {"query": [1, 2], "items": [[3], [4]], "label_token_ids": [1]}
    for name in names:
        for _ in range(2):
            assert client.post("/v1/score", json=body, headers=by(name)).status_code == 200
        with client.stream("POST", "/v1/completions", json={"prompt": [1, 2, 3], "stream": True}, headers=by(name)) as answer:
            answer.read()
    told = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
    assert set(re.findall('yardstick_key_.*{key="([^"]+)"', "\n".join(told))) == {"one", "two", ":other"}
    written = len(engine.says) + 1
    for key, times in (("one", 1), ("two", 1), (":other", 2)):
        assert float(told[f'yardstick_key_requests_total{{key="{key}"}}']) == 3 * times
        assert float(told[f'yardstick_key_items_total{{key="{key}"}}']) == 4 * times
        assert float(told[f'yardstick_key_tokens_total{{key="{key}",kind="prompt"}}']) == 15 * times
        assert float(told[f'yardstick_key_tokens_total{{key="{key}",kind="prompt_cached"}}']) == 6 * times
        assert float(told[f'yardstick_key_tokens_total{{key="{key}",kind="completion"}}']) == written * times
    silent = start(engine, api_keys_file=keys, metrics_names=True)
    assert silent.post("/v1/score", json=body, headers=by("one")).status_code == 200
    assert 'key="' not in silent.get("/metrics").text


def test_what_alerts_count_begins_with_zero(start: Start) -> None:
    """Prometheus sees no increase where a series begins with its first event."""
    page = start(FakeEngine()).get("/metrics").text
    for name in ("engine_silences", "engine_ejections", "resumed_sequences"):
        assert f'yardstick_{name}_total{{model="fake"}} 0.0' in page
    for result in ("hit", "miss"):
        assert f'yardstick_cache_lookups_total{{model="fake",result="{result}"}} 0.0' in page


STATS = wire.Stats(
    running=0,
    waiting=0,
    slots_total=1000,
    slots_free=100,
    slots_cached=900,
    steps=1,
    computed_tokens=1,
    cached_tokens=1,
    slots_items=500,
    item_bytes=64_000,
    scored_items=300,
    cached_items=200,
    evicted_item_tokens=77,
    compiling=3,
)


def told(client: httpx.Client, name: str, engine: FakeEngine) -> float:
    return metric(client, f'yardstick_item_cache_{name}{{engine="{engine.url}"}}')


def test_each_engine_has_its_series(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that tells nothing, such as an older one, has none; one that is away keeps its last ones."""
    monkeypatch.setattr("yardstick_llm.gateway.pool.pool.STATS_SECONDS", 0.05)
    one, old = FakeEngine(stats=STATS), FakeEngine()
    client = start(one, old)
    wait_until(lambda: "yardstick_item_cache_tokens{" in client.get("/metrics").text)
    found = {name: told(client, name, one) for name in ("tokens", "bytes")}
    assert found == {"tokens": 500, "bytes": 64_000}
    counted = [told(client, f"{name}_total", one) for name in ("scored_items", "found_items", "evicted_tokens")]
    assert counted == [300, 200, 77]
    assert metric(client, f'yardstick_grammar_queue{{engine="{one.url}"}}') == 3
    assert f'item_cache_tokens{{engine="{old.url}"}}' not in client.get("/metrics").text
    one.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert told(client, "tokens", one) == 500


def test_saved_tokens_are_those_of_both_caches(start: Start) -> None:
    client = start(FakeEngine(prefixes=PrefixCache()))
    query, items = ids(" Is it?"), [[20, 30, 40, 50], [21, 31, 41, 51]]

    def saved() -> tuple[float, float]:
        series = 'yardstick_item_first_tokens_total{{model="fake",result="{}"}}'
        return metric(client, series.format("saved")), metric(client, series.format("computed"))

    def score(query: list[int], **body: object) -> None:
        asked = {"query": query, "items": items, "item_first": True, "label_token_ids": [5]}
        client.post("/v1/score", json=asked | body).raise_for_status()

    whole = sum(map(len, items)) + 2 * len(query)
    score(query)
    assert saved() == (0, whole)
    score(query)
    assert saved() == (whole, whole), "results of the cache save whole prompts"
    score([*query, 9])
    assert saved() == (whole + 8, 2 * whole + 2 - 8), "prefix caches save the items"
    score(query, item_first=False, items=[[60]])
    assert sum(saved()) == 3 * whole + 2, "other prompts do not count"
    client.put("/v1/catalogues/shop", json={"template": ["{item}", "{query}"]}).raise_for_status()
    body = [{"id": f"i{place}", "token_ids": item} for place, item in enumerate(items)]
    client.put("/v1/catalogues/shop/items", json=body).raise_for_status()
    asked = {"query": [8, 9], "catalogue": "shop", "top_n": 1, "label_token_ids": [5]}
    before = saved()
    client.post("/v1/score", json=asked).raise_for_status()
    assert (saved()[0] - before[0], saved()[1] - before[1]) == (8, 4)


def test_the_first_models_have_labels_and_later_ones_share_one() -> None:
    label = ModelLabels(2)
    assert [label(name) for name in ("a", None, "", "b", "c", "a", "d")] == ["a", "", "", "b", OTHER, "a", OTHER]
