"""Traces of a gateway and engines that are real processes, before a collector that is a real HTTP server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

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
def pod(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    model = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)
    with Pod(model, "--name", "tiny", "--tracing-endpoint", collector.url) as pod:
        yield pod


@pytest.fixture(scope="module")
def gateway(pod: Pod, collector: Collector) -> Iterator[Program]:
    tracing = {"YARDSTICK_TRACING_ENDPOINT": collector.url, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    with gateway_before(pod, **tracing) as gateway:
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


def test_programs_end_in_time_before_a_silent_collector(gateway: Program, pod: Pod, collector: Collector):
    """Last of the tests, which share the programs."""
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
