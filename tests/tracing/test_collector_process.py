"""Spans of the exporter, and of a gateway and an engine, through a collector of another project, Rotel: it receives OTLP, decodes
it, and sends it on to the tests' server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.collector import Collector, collecting
from tests.processes import free_port, wait_until
from yardstick_llm.tracing.setup import open_exporter
from yardstick_llm.tracing.spans import Span

rotel = pytest.importorskip("rotel", reason="Rotel has wheels for some platforms only")


@pytest.fixture
def behind() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def url(behind: Collector) -> Iterator[str]:
    grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
    program = Path(rotel.__file__).with_name("rotel-agent")
    listening = ["--otlp-grpc-endpoint", grpc, "--otlp-http-endpoint", http, "--batch-timeout", "50ms"]
    sending = ["--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", behind.url]
    process = subprocess.Popen([program, "start", *listening, *sending], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None
        try:
            return bool(httpx.get(f"http://{http}").status_code)
        except httpx.TransportError:
            return False

    wait_until(answers)
    yield f"http://{http}"
    process.kill()
    process.wait()


def test_a_trace_passes_through(url: str, behind: Collector) -> None:
    exporter = open_exporter(url, None, default_service="tested", environment={})
    assert exporter is not None
    exporter.start()
    first = Span("first", 0xABC, kind="server", state="a=1")
    child = Span("child", 0xABC, first.span_id, "client", attributes={"gen_ai.request.model": "m", "yardstick.attempt": 2})
    child.event("first_token")
    child.finish("engine_lost")
    first.finish()
    exporter.put([first, child])
    exporter.close()
    assert exporter.dropped == 0
    spans = behind.trace(f"{0xABC:032x}", 2)
    assert [(span.name, span.kind, span.service, span.failed) for span in spans] == [
        ("first", "server", "tested", False),
        ("child", "client", "tested", True),
    ]
    assert [span.parent_id for span in spans] == ["", f"{first.span_id:016x}"]
    assert spans[0].state == "a=1"
    assert spans[1].attributes == {"gen_ai.request.model": "m", "yardstick.attempt": 2, "error.type": "engine_lost"}
    assert spans[1].events == ["first_token"]
    assert (spans[1].begin, spans[1].end) == (child.begin, child.end)
