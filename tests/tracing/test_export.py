"""The queue and the thread that sends spans, before a real HTTP server that reads OTLP."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.collector import Collector, collecting
from tests.processes import wait_until
from yardstick_llm.tracing.export import Exporter, TracingError
from yardstick_llm.tracing.setup import check_endpoint, open_exporter
from yardstick_llm.tracing.spans import Span

QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "10"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def open_to() -> Iterator[object]:
    opened: list[Exporter] = []

    def start(endpoint: str | None, service: str | None = None, **variables: str) -> Exporter:
        exporter = open_exporter(endpoint, service, default_service="tested", environment=QUICK | variables)
        assert exporter is not None
        exporter.start()
        opened.append(exporter)
        return exporter

    yield start
    for exporter in opened:
        exporter.close(0)
    # Pauses between attempts are random, and Hypothesis complains if another thread uses its generator.
    wait_until(lambda: not any(thread.name == "traces" for thread in threading.enumerate()), 20)


def request(spans: int = 1) -> list[Span]:
    made = [Span(f"span {index}", trace_id=7, parent_id=index) for index in range(spans)]
    for span in made:
        span.finish()
    return made


def test_spans_arrive_as_they_were_recorded(collector: Collector, open_to) -> None:
    exporter = open_to(collector.url)
    span = Span("work", 0xABC, 0xDEF, "client", remote_parent=True, state="a=1")
    span.attributes |= {"text": "x", "number": 3, "part": 0.5, "flag": True, "list": ["a", "b"]}
    span.event("halfway")
    span.finish("engine_lost")
    exporter.put([span])
    (found,) = collector.trace(f"{0xABC:032x}", 1)
    assert (found.name, found.kind, found.service, found.failed) == ("work", "client", "tested", True)
    assert (found.parent_id, found.span_id) == (f"{0xDEF:016x}", f"{span.span_id:016x}")
    assert (found.begin, found.end, found.events, found.state) == (span.begin, span.end, ["halfway"], "a=1")
    assert found.attributes == {
        "text": "x",
        "number": 3,
        "part": 0.5,
        "flag": True,
        "list": ["a", "b"],
        "error.type": "engine_lost",
    }
    assert found.resource["host.name"]
    assert found.resource["service.version"]
    assert exporter.dropped == 0


def test_a_full_batch_does_not_wait(collector: Collector, open_to) -> None:
    exporter = open_to(collector.url, OTEL_BSP_SCHEDULE_DELAY="60000", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4")
    for _ in range(3):
        exporter.put(request(2))
    wait_until(lambda: len(collector.spans) == 6)
    assert len(collector.bodies) == 2


def test_a_silent_collector_delays_nobody_and_spans_beyond_the_queue_are_dropped(collector: Collector, open_to) -> None:
    collector.open.clear()
    exporter = open_to(collector.url, OTEL_BSP_MAX_QUEUE_SIZE="100", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10")
    longest = 0.0
    for _ in range(200):
        spans, began = request(2), time.perf_counter()
        exporter.put(spans)
        longest = max(longest, time.perf_counter() - began)
    assert longest < 0.5
    assert exporter.dropped == 300
    began = time.perf_counter()
    exporter.close(0.2)
    assert 0.15 < time.perf_counter() - began < 2
    assert exporter.dropped == 400
    collector.status = 400
    collector.open.set()
    wait_until(lambda: not any(thread.name == "traces" for thread in threading.enumerate()))
    assert exporter.dropped == 400, "spans of the batch on its way are counted once"


def test_refused_spans_are_dropped_and_later_ones_arrive(collector: Collector, open_to) -> None:
    collector.status = 400
    exporter = open_to(collector.url)
    exporter.put(request(5))
    wait_until(lambda: exporter.dropped == 5)
    collector.status = 200
    exporter.put(request(2))
    wait_until(lambda: len(collector.spans) == 2)
    assert exporter.dropped == 5


def test_the_variables_of_opentelemetry(
    collector: Collector, open_to, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s3cret",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "theirs",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.DEBUG):
        open_to(None, **variables).put(request())
        wait_until(lambda: collector.spans)
        collector.status = 403
        refused = open_to(None, **variables)
        refused.put(request())
        wait_until(lambda: refused.dropped)
    assert collector.headers[0]["authorization"] == "Bearer s3cret"
    assert collector.headers[0]["content-encoding"] == "gzip"
    assert "s3cret" not in caplog.text
    (span,) = collector.spans
    assert span.service == "theirs"
    assert span.resource["deployment.environment.name"] == "test"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_off(variables: dict[str, str]) -> None:
    assert open_exporter(None, None, default_service="tested", environment=variables) is None


def test_opentelemetry_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, "yardstick_llm.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    remedy = r"pip install 'yardstick-llm\[tracing\]'"
    with pytest.raises(TracingError, match=remedy):
        open_exporter("http://h:4318", None, default_service="tested", environment={})
    with caplog.at_level(logging.WARNING):
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}
        assert open_exporter(None, None, default_service="tested", environment=given) is None
    assert "yardstick-llm[tracing]" in caplog.text


@pytest.mark.parametrize(
    "endpoint", ["", "collector:4318", "grpc://c:4317", "http://", "http://c:x", "http://user:s3cret@c", "http://c?token=s3cret"]
)
def test_other_urls(endpoint: str) -> None:
    with pytest.raises(TracingError) as error:
        check_endpoint(endpoint)
    assert "s3cret" not in str(error.value)
