"""Traces of requests: a gateway before fake engines and before a collector that is a real HTTP server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.collector import Collector, Received, collecting
from tests.fakes import LIMITS, FakeEngine, Faults
from tests.gateway.conftest import Start, gateways, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire

SECRET = "a red secret"
SCORE: dict[str, Any] = {"query": SECRET, "items": ["one", "two"], "labels": [" Yes"]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """An engine that tests change, and a gateway that exports traces."""
    engine = FakeEngine()
    with pytest.MonkeyPatch.context() as environment, gateways() as start_gateway:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield engine, start_gateway(engine, tracing_endpoint=collector.url)


@pytest.fixture
def engine(traced: tuple[FakeEngine, httpx.Client]) -> FakeEngine:
    """The engine, without faults."""
    traced[0].faults = Faults()
    return traced[0]


@pytest.fixture
def client(traced: tuple[FakeEngine, httpx.Client], engine: FakeEngine) -> httpx.Client:
    return traced[1]


def parent(sampled: bool = True) -> tuple[str, dict[str, str]]:
    """A new trace, and the headers of a client in it."""
    trace_id = os.urandom(16).hex()
    return trace_id, {"traceparent": f"00-{trace_id}-00000000000000aa-{'01' if sampled else '00'}"}


def names(spans: list[Received]) -> list[str]:
    return [span.name for span in spans]


def test_a_score_is_traced_from_its_client_to_the_attempt(client: httpx.Client, collector: Collector) -> None:
    trace_id, headers = parent()
    client.post("/v1/score", json=SCORE, headers=headers | {"tracestate": "a=1", "x-request-id": "my-id"}).raise_for_status()
    spans = collector.trace(trace_id, 6)
    assert names(spans) == [
        "POST /v1/score",
        "gateway.receive",
        "gateway.read",
        "gateway.cache",
        "gateway.attempt",
        "gateway.answer",
    ]
    first, rest = spans[0], spans[1:]
    assert (first.kind, first.parent_id, first.state, first.failed) == ("server", "00000000000000aa", "a=1", False)
    assert {span.parent_id for span in rest} == {first.span_id}
    assert all(first.begin <= span.begin <= span.end <= first.end for span in rest)
    assert first.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/score",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "score",
        "gen_ai.provider.name": "yardstick",
        "gen_ai.request.model": "fake",
        "gen_ai.usage.input_tokens": first.attributes["gen_ai.usage.input_tokens"],
        "yardstick.items": 2,
        "yardstick.outcome": "ok",
        "yardstick.request_id": "my-id",
    }
    assert spans[3].attributes == {"yardstick.cache.hits": 0, "yardstick.cache.misses": 2}
    attempt = spans[4]
    assert attempt.kind == "client"
    assert attempt.attributes["server.address"] == "127.0.0.1"
    assert attempt.attributes["server.port"] == int(traced_port(client))
    assert attempt.attributes["yardstick.attempt"] == 1
    trace_id, headers = parent()
    assert client.post("/v1/score", json=SCORE, headers=headers).headers["x-yardstick-cache"] == "2/2"
    spans = collector.trace(trace_id, 5)
    assert "gateway.attempt" not in names(spans)
    assert spans[0].attributes["yardstick.cache.hits"] == 2


def traced_port(client: httpx.Client) -> str:
    """Port of the only engine, from the gateway's metrics."""
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("yardstick_engine_requests_in_flight{")]
    return line.partition('",')[0].rpartition(":")[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_has_its_first_token_and_its_end(client: httpx.Client, collector: Collector, stream: bool) -> None:
    trace_id, headers = parent()
    client.post("/v1/chat/completions", json=CHAT | {"stream": stream, "n": 2}, headers=headers).raise_for_status()
    spans = {span.name: span for span in collector.trace(trace_id, 5)}
    first = spans["POST /v1/chat/completions"]
    assert first.attributes["gen_ai.operation.name"] == "chat"
    assert first.attributes["gen_ai.usage.output_tokens"] == 8
    assert first.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert first.events == ["first_byte"]
    assert spans["gateway.attempt"].events == ["first_token"]


@pytest.mark.slow
def test_a_request_has_a_bounded_number_of_spans(start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    client = start(FakeEngine(limits=msgspec.structs.replace(LIMITS, max_branches=8)), tracing_endpoint=collector.url)
    trace_id, headers = parent()
    items = [[place % 250, place // 250] for place in range(1250)]  # 157 messages to the engine
    client.post("/v1/score", json={"query": [9], "items": items, "label_token_ids": [1]}, headers=headers).raise_for_status()
    assert 120 <= len(collector.trace(trace_id, 120)) <= 130


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "x" * 10_000)],
        [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")] * 100,
        [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"), ("tracestate", "a=" + "b" * 10_000)],
        [("traceparent", b"00-\xff\xfe")],
        [("traceparent", ""), ("tracestate", ",")],
    ],
    ids=["long", "many", "state", "bytes", "empty"],
)
def test_hostile_contexts_change_nothing(client: httpx.Client, collector: Collector, headers: list[tuple[str, Any]]) -> None:
    before = len(collector.spans)
    answer = client.post("/v1/score", json=SCORE, headers=[*headers, ("x-request-id", "hostile")])
    assert answer.status_code == 200
    wait_until(lambda: any(span.attributes.get("yardstick.request_id") == "hostile" for span in collector.spans[before:]))
    first = next(span for span in collector.spans[before:] if span.kind == "server")
    assert first.state == ""
    assert (first.parent_id == "") is (first.trace_id != "1" * 32), "a new trace begins"
    assert (first.trace_id == "1" * 32) is (headers[0][1] == f"00-{'1' * 32}-{'2' * 16}-01" and len(headers) == 2)


@pytest.mark.slow
def test_the_client_decides_whether_its_request_is_traced(
    client: httpx.Client, collector: Collector, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    never = start(FakeEngine(), tracing_endpoint=collector.url)
    not_sampled, sampled = parent(sampled=False), parent()
    client.post("/v1/score", json=SCORE, headers=not_sampled[1]).raise_for_status()
    never.post("/v1/score", json=SCORE, headers={"x-request-id": "never"}).raise_for_status()
    never.post("/v1/score", json=SCORE, headers=sampled[1]).raise_for_status()
    collector.trace(sampled[0], 2)
    assert not [span for span in collector.spans if span.trace_id == not_sampled[0]]
    assert not [span for span in collector.spans if span.attributes.get("yardstick.request_id") == "never"]


def test_probes_are_not_traced(client: httpx.Client, collector: Collector) -> None:
    traces = [parent() for _ in range(2)]
    client.get("/readyz", headers=traces[0][1])
    client.get("/v1/models", headers=traces[1][1])
    assert names(collector.trace(traces[1][0], 1)) == ["GET /v1/models"]
    assert not [span for span in collector.spans if span.trace_id == traces[0][0]]


def test_errors(client: httpx.Client, engine: FakeEngine, collector: Collector) -> None:
    refused, failed, missing = parent(), parent(), parent()
    client.post("/v1/score", json=SCORE | {"model": "other"}, headers=refused[1])
    (first, *_) = collector.trace(refused[0], 2)
    assert first.attributes["error.type"] == "model_not_found"
    assert first.attributes["http.response.status_code"] == 404
    assert not first.failed, "it is the client's error"
    assert "gen_ai.request.model" not in first.attributes, "the client may have written anything there"
    engine.faults.fail = wire.Failed("", "internal", "a secret of the engine")
    assert client.post("/v1/score", json=SCORE | {"query": "new"}, headers=failed[1]).status_code == 500
    spans = {span.name: span for span in collector.trace(failed[0], 5)}
    assert spans["POST /v1/score"].failed
    assert spans["gateway.attempt"].failed
    assert spans["gateway.attempt"].attributes["error.type"] == "internal_error"
    client.get("/none/of/ours", headers=missing[1])
    assert names(collector.trace(missing[0], 1)) == ["GET"]


def test_a_broken_stream_is_a_failed_span(client: httpx.Client, engine: FakeEngine, collector: Collector) -> None:
    engine.faults.fail_after = 2
    trace_id, headers = parent()
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 8}, headers=headers)
    assert answer.status_code == 200
    first, *rest = collector.trace(trace_id, 4)
    assert first.failed
    assert first.attributes["yardstick.outcome"] == "broken_stream"
    (attempt,) = [span for span in rest if span.name == "gateway.attempt"]
    assert (attempt.failed, attempt.events) == (True, ["first_token"])


@pytest.fixture
def breaking(start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeEngine, httpx.Client]:
    """An engine that tests break, and a gateway before it and a sound one."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    engine = FakeEngine()
    return engine, start(engine, FakeEngine(), tracing_endpoint=collector.url)


def attempts_of(client: httpx.Client, collector: Collector, path: str, body: dict[str, Any]) -> list[Received]:
    """Attempts of the first request that meets the broken engine first."""
    for _ in range(20):
        trace_id, headers = parent()
        client.post(path, json=body | {"cache_salt": trace_id}, headers=headers).raise_for_status()
        attempts = [span for span in collector.trace(trace_id, 5) if span.name == "gateway.attempt"]
        if len(attempts) > 1:
            return attempts
    raise AssertionError("the sound engine was chosen 20 times")


@pytest.mark.slow
def test_a_retry_is_a_second_attempt(breaking: tuple[FakeEngine, httpx.Client], collector: Collector) -> None:
    engine, client = breaking
    engine.faults.break_after = 0
    one, two = attempts_of(client, collector, "/v1/score", SCORE)
    assert (one.attributes["yardstick.attempt"], two.attributes["yardstick.attempt"]) == (1, 2)
    assert (one.failed, one.attributes["error.type"]) == (True, "engine_lost")
    assert not two.failed
    assert one.attributes["server.port"] == int(engine.url.rpartition(":")[2])
    assert one.attributes["server.port"] != two.attributes["server.port"]


@pytest.mark.slow
def test_a_stream_that_continues_elsewhere_has_two_attempts(
    breaking: tuple[FakeEngine, httpx.Client], collector: Collector
) -> None:
    engine, client = breaking
    engine.faults.break_after = 2
    attempts = attempts_of(client, collector, "/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 5})
    assert [span.attributes["yardstick.attempt"] for span in attempts] == [1, 2]
    assert [span.failed for span in attempts] == [True, False]
    assert [span.events for span in attempts] == [["first_token"]] * 2


MISSES = 'yardstick_cache_lookups_total{model="fake",result="miss"}'


def test_a_request_that_waits_for_the_results_of_another(client: httpx.Client, engine: FakeEngine, collector: Collector) -> None:
    engine.faults.hold = True
    trace_id, headers = parent()
    body = SCORE | {"query": "shared"}
    computing = threading.Thread(target=client.post, args=["/v1/score"], kwargs={"json": body})
    computing.start()
    wait_until(lambda: engine.running)
    looked_up = metric(client, MISSES)
    waiting = threading.Thread(target=client.post, args=["/v1/score"], kwargs={"json": body, "headers": headers})
    waiting.start()
    wait_until(lambda: metric(client, MISSES) > looked_up)  # and waits from then on
    engine.faults.hold = False
    for thread in (computing, waiting):
        thread.join()
    spans = names(collector.trace(trace_id, 6))
    assert "gateway.shared" in spans
    assert "gateway.attempt" not in spans


def test_a_client_that_leaves(client: httpx.Client, engine: FakeEngine, collector: Collector) -> None:
    engine.faults.hold = True
    trace_id, headers = parent()
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/score", json=SCORE | {"query": "left"}, headers=headers, timeout=0.3)
    spans = {span.name: span for span in collector.trace(trace_id, 4)}
    engine.faults.hold = False
    assert spans["POST /v1/score"].attributes["yardstick.outcome"] == "client_gone"
    assert spans["gateway.attempt"].attributes["yardstick.cancelled"] is True
    assert not spans["gateway.attempt"].failed


@pytest.mark.slow
def test_waiting_for_an_engine_is_a_stage(start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    engine = FakeEngine()
    client = start(engine, tracing_endpoint=collector.url)
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    trace_id, headers = parent()
    assert client.post("/v1/score", json=SCORE, headers=headers).status_code == 503
    (wait,) = [span for span in collector.trace(trace_id, 5) if span.name == "gateway.wait"]
    assert wait.end - wait.begin >= 0.09e9  # wait_seconds of the test's gateways is 0.1


def test_nothing_that_clients_write_is_exported(client: httpx.Client, collector: Collector) -> None:
    trace_id, headers = parent()
    keyed = headers | {"authorization": "Bearer sk-very-secret", "cookie": "sk-very-secret"}
    client.post(f"/v1/chat/completions?key={SECRET}", json=CHAT | {"user": SECRET, "stop": [SECRET]}, headers=keyed)
    collector.trace(trace_id, 4)
    exported = b"".join(collector.bodies)
    assert b"POST /v1/chat/completions" in exported
    assert SECRET.encode() not in exported
    assert b"sk-very-secret" not in exported


def test_exemplars_lead_from_latencies_to_traces(client: httpx.Client) -> None:
    trace_id, headers = parent()
    client.post("/v1/score", json=SCORE, headers=headers)
    wait_until(lambda: trace_id in open_metrics(client).text)
    answer = open_metrics(client)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name in ("yardstick_request_seconds", "yardstick_first_byte_seconds"):
        found = [sample for sample in families[name].samples if sample.exemplar and sample.labels["route"] == "/v1/score"]
        assert trace_id in {sample.exemplar.labels["trace_id"] for sample in found}
    assert families["yardstick_spans_dropped"].samples[0].value == 0
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=1.0.0")
    assert "trace_id" not in plain.text
    assert "# EOF" not in plain.text


def open_metrics(client: httpx.Client) -> httpx.Response:
    return client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})


def test_open_metrics_without_traces(shared: httpx.Client) -> None:
    """The parser is strict, so every metric of a gateway keeps to the format."""
    shared.post("/v1/score", json=SCORE)
    families = [*text_string_to_metric_families(open_metrics(shared).text)]
    assert len(families) > 40
    assert not [sample for family in families for sample in family.samples if sample.exemplar]
    assert "yardstick_spans_dropped" not in {family.name for family in families}


@pytest.mark.slow
def test_a_silent_collector_delays_no_request(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    with collecting() as silent:
        silent.open.clear()
        client = start(FakeEngine(), tracing_endpoint=silent.url)
        began = time.monotonic()
        for _ in range(20):
            client.post("/v1/score", json=SCORE).raise_for_status()
        assert time.monotonic() - began < 5
        assert metric(client, "yardstick_spans_dropped_total") > 50
