"""Traces of a gateway and engines that are real processes, before a collector that is a real HTTP server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.collector import Collector, Received, collecting
from tests.processes import Pod, Program, gateway_before

pytestmark = pytest.mark.slow

STREAM = {"model": "tiny", "prompt": "the", "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def pods(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pod]]:
    model: Path = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)
    flags = ("--name", "tiny", "--tracing-endpoint", collector.url)
    with Pod(model, *flags) as one, Pod(model, *flags) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def gateway(pods: list[Pod], collector: Collector) -> Iterator[Program]:
    tracing = {"YARDSTICK_TRACING_ENDPOINT": collector.url, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    with gateway_before(*pods, **tracing) as gateway:
        yield gateway


def sampled() -> tuple[str, dict[str, str]]:
    trace_id = os.urandom(16).hex()
    return trace_id, {"traceparent": f"00-{trace_id}-00000000000000aa-01", "tracestate": "a=1"}


def named(spans: list[Received], name: str) -> Received:
    (span,) = [span for span in spans if span.name == name]
    return span


def test_a_score_is_one_trace_over_gateway_and_engine(gateway: Program, collector: Collector):
    trace_id, headers = sampled()
    body = {"model": "tiny", "query": "Is it red?", "items": ["a", "b"], "labels": ["Yes"]}
    answer = gateway.client.post("/v1/score", json=body, headers=headers).raise_for_status().json()
    spans = collector.trace(trace_id, 9)
    first, attempt, whole = (named(spans, name) for name in ("POST /v1/score", "gateway.attempt", "engine.score"))
    assert [first.parent_id, attempt.parent_id, whole.parent_id] == ["00000000000000aa", first.span_id, attempt.span_id]
    assert (first.service, whole.service, whole.kind, whole.state) == ("yardstick-gateway", "yardstick-engine", "server", "a=1")
    queue, prefill = named(spans, "engine.queue"), named(spans, "engine.prefill")
    assert queue.parent_id == prefill.parent_id == whole.span_id
    assert attempt.begin <= whole.begin == queue.begin <= queue.end == prefill.begin < prefill.end <= whole.end <= attempt.end
    assert whole.attributes["yardstick.rows"] == 2
    assert 0 < whole.attributes["yardstick.computed_tokens"] <= answer["usage"]["prompt_tokens"]
    assert not any(span.failed for span in spans)


def test_a_stream_has_prefill_and_decode(gateway: Program, collector: Collector):
    trace_id, headers = sampled()
    gateway.client.post("/v1/completions", json=STREAM | {"max_tokens": 30, "n": 2}, headers=headers).raise_for_status()
    spans = collector.trace(trace_id, 9)
    attempt, whole = named(spans, "gateway.attempt"), named(spans, "engine.generate")
    queue, prefill, decode = (named(spans, f"engine.{part}") for part in ("queue", "prefill", "decode"))
    assert whole.parent_id == attempt.span_id
    assert attempt.events == ["first_token"]
    assert whole.begin == queue.begin <= prefill.begin < prefill.end == decode.begin < decode.end == whole.end
    assert whole.attributes["yardstick.output_tokens"] == 60
    assert whole.attributes["yardstick.finish_reasons"] == ["length", "length"]
    assert named(spans, "POST /v1/completions").attributes["gen_ai.usage.output_tokens"] == 60


def test_the_engine_of_a_stream_is_killed(gateway: Program, pods: list[Pod], collector: Collector):
    """Last of the tests that share the engines."""
    trace_id, headers = sampled()
    with gateway.client.stream("POST", "/v1/completions", json=STREAM | {"max_tokens": 600}, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        (busy,) = [pod for pod in pods if "yardstick_engine_requests_running 1.0" in pod.client.get("/metrics").text]
        busy.process.kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    spans = collector.trace(trace_id, 9)
    one, two = [span for span in spans if span.name == "gateway.attempt"]
    assert (one.failed, one.attributes["error.type"]) == (True, "engine_lost")
    assert one.attributes["server.port"] == busy.port
    assert (two.failed, two.attributes["yardstick.attempt"], two.events) == (False, 2, ["first_token"])
    assert named(spans, "engine.generate").parent_id == two.span_id, "the spans of the killed engine are lost"
    assert not named(spans, "POST /v1/completions").failed


def test_programs_end_in_time_before_a_silent_collector(gateway: Program, pods: list[Pod], collector: Collector):
    """Last of all."""
    (pod,) = [pod for pod in pods if pod.process.poll() is None]
    collector.open.clear()
    _, headers = sampled()
    gateway.client.post("/v1/completions", json=STREAM | {"max_tokens": 3}, headers=headers).raise_for_status()
    for program in (gateway, pod):
        began = time.monotonic()
        program.client.close()
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(15) == 0
        assert time.monotonic() - began < 8  # uvicorn's own shutdown, and two seconds for the last spans
        assert "spans did not reach the collector" in program.process.stderr.read()
