"""Every kind of ending, provoked on a real socket, and times that are counted from the schedule."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest

from tests.loadgen.servers import Handler, Request, answer, end, event, piece, scores, serving, stream
from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.records import Run
from yardstick_llm.loadgen.runner import run
from yardstick_llm.loadgen.scenario import load
from yardstick_llm.loadgen.statistics import evaluate

SCORE = ("workloads[0].query_length=3", "workloads[0].item_length=4", "workloads[0].items=2")
CHAT = ("workloads[0].kind=chat", "workloads[0].max_tokens=4")


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap of the tests is large: a garbage collection at the start of a run would take a second of its schedule. Few requests
    are made ahead: a closed loop has no last one."""
    monkeypatch.setattr("yardstick_llm.loadgen.client._undisturbed", nullcontext)
    monkeypatch.setattr("yardstick_llm.loadgen.maker.BUFFER_REQUESTS", 50)


def drive(url: str, *settings: str, key: str | None = None) -> Run:
    """A short run at a constant rate."""
    plain = ("arrivals.kind=constant", "arrivals.rate=20", "duration_s=0.25", f"target.url={url}")
    return run(load(None, [*plain, *settings]), Share(), key, "test", None)


async def good(request: Request, writer: asyncio.StreamWriter) -> None:
    answer(writer, scores(request), x_yardstick_cache="1/2")


def test_good_answers_are_recorded() -> None:
    with serving(good) as url:
        done = drive(url, *SCORE)
    assert [record.scheduled for record in done.records] == [0.0, 0.05, 0.1, 0.15, 0.2]
    for record in done.records:
        assert record.scheduled <= record.sent < record.first_byte <= record.end
        assert (record.workload, record.status, record.failure, record.items) == ("score", 200, None, 2)
        assert (record.prompt_tokens, record.cache) == (7, "1/2")
    assert not done.interrupted


async def refusing(request: Request, writer: asyncio.StreamWriter) -> None:
    error = {"error": {"message": "Too much to do; key sk-secret.", "code": "overloaded"}}
    answer(writer, error, "429 Too Many Requests", retry_after="2")


async def hanging(request: Request, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


def raw(content: bytes, *, stalls: bool = False) -> Handler:
    """Writes these bytes, and closes the connection or keeps it."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()
        if stalls:
            await asyncio.sleep(30)
        writer.close()

    return handler


def answering(body: bytes | dict[str, Any]) -> Handler:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        answer(writer, body)

    return handler


FAULTS: list[tuple[Handler, str, str]] = [
    (refusing, "status", "Too much to do; key ***."),
    (hanging, "timeout", ""),
    (raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", stalls=True), "timeout", ""),
    (raw(b""), "lost", "disconnected"),
    (raw(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"scores": [['), "cut", ""),
    (answering(b"<html>"), "bad_body", "malformed"),
    (raw(b"SSH-2.0-OpenSSH_9\r\n\r\n"), "bad_body", "HTTP"),
    (answering({"scores": [[0.5, 0.5]]}), "bad_body", "1 score lists for 2 items"),
    (answering({"scores": [[0.5], [0.5]]}), "bad_body", "an item has not 2 scores"),
]


def in_turn(handlers: Iterable[Handler]) -> Handler:
    left = list(handlers)

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        await left.pop(0)(request, writer)

    return handle


def test_failures_have_kinds() -> None:
    with serving(in_turn(handler for handler, _, _ in FAULTS)) as url:
        done = drive(url, *SCORE, "target.timeout_s=0.3", f"duration_s={len(FAULTS) / 20}", key="sk-secret")
    assert sorted(record.failure or "" for record in done.records) == sorted(kind for _, kind, _ in FAULTS)
    for _, kind, says in FAULTS:
        assert any(record.failure == kind and says in record.detail for record in done.records), kind
    assert not any("sk-secret" in record.detail for record in done.records)
    results = evaluate(done)
    assert results.total.failures == {"status 429": 1, "timeout": 2, "lost": 1, "cut": 1, "bad_body": 4}
    assert results.retry_after == 1
    assert not results.passed


def test_no_server_and_no_such_name() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        done = drive(f"http://127.0.0.1:{unheard.getsockname()[1]}", *SCORE)
    assert {record.failure for record in done.records} == {"connect"}
    done = drive("http://nowhere.invalid", *SCORE, "duration_s=0.05")
    assert {record.failure for record in done.records} == {"connect"}


CHUNKS = [piece("a"), piece(""), piece("b"), piece("", "length")]
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}


def streaming(*, pause: float = 0.0, events: list[Any], ends: bool = True) -> Handler:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        assert request.path == "/v1/chat/completions"
        stream(writer)
        for one in events:
            event(writer, one)
            await writer.drain()
            await asyncio.sleep(pause)
        if ends:
            end(writer)
        else:
            writer.close()

    return handler


def test_a_stream_is_timed() -> None:
    with serving(streaming(pause=0.05, events=[*CHUNKS, USAGE, "[DONE]"])) as url:
        done = drive(url, *CHAT)
    for record in done.records:
        assert record.failure is None
        assert (record.prompt_tokens, record.completion_tokens) == (9, 3)
        assert record.gaps is not None
        assert record.gaps == [pytest.approx(record.last_token - record.first_token, abs=1e-5)], "an empty piece is no token"
        assert record.gaps[0] >= 0.09
        assert record.tpot == pytest.approx(record.gaps[0] / 2, abs=1e-5)
        assert record.ttft == pytest.approx(record.first_token - record.scheduled)
        assert record.end - record.last_token >= 0.09


BROKEN: list[tuple[Handler, str]] = [
    (streaming(events=CHUNKS[:2], ends=False), "cut"),
    (streaming(events=CHUNKS), "cut"),
    (streaming(events=[CHUNKS[0], {"error": {"message": "the engine was lost", "code": None}}]), "stream_error"),
    (streaming(events=[CHUNKS[0], "{"]), "bad_body"),
    (streaming(events=[CHUNKS[0], "[DONE]"]), "bad_body"),
]


def test_broken_streams_have_kinds() -> None:
    with serving(in_turn(handler for handler, _ in BROKEN)) as url:
        done = drive(url, *CHAT)
    assert sorted(record.failure or "" for record in done.records) == sorted(kind for _, kind in BROKEN)
    assert "the engine was lost" in [record.detail for record in done.records]


def test_latency_counts_from_the_schedule_and_nobody_waits_for_an_answer() -> None:
    """An open loop: a server that takes one request at a time, 0.1 s each, is sent all of them, and queueing shows."""
    gate = asyncio.Lock()

    async def one_at_a_time(request: Request, writer: asyncio.StreamWriter) -> None:
        async with gate:
            await asyncio.sleep(0.1)
        answer(writer, scores(request))

    with serving(one_at_a_time) as url:
        done = drive(url, *SCORE, "arrivals.rate=50", "duration_s=0.2")
    assert len(done.records) == 10
    assert max(record.latency for record in done.records) > 0.75
    ends = sorted(record.end for record in done.records)
    assert max(record.sent for record in done.records) < ends[5]
    assert all(record.latency == record.end - record.scheduled for record in done.records)


def test_a_closed_loop_waits_and_its_clients_are_bounded() -> None:
    now, most = 0, 0
    together = asyncio.Event()

    async def counting(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        if now == 3:
            together.set()
        await together.wait()  # however late a client begins
        await asyncio.sleep(0.05)
        now -= 1
        answer(writer, scores(request))

    with serving(counting) as url:
        done = drive(url, *SCORE, "arrivals.kind=closed", "arrivals.clients=3", "arrivals.think_s=0.05", "duration_s=1")
    assert most == 3
    assert 3 < len(done.records) <= 33, "0.1 s of answer and thought for each of three clients, in 1 s"
    assert all(record.scheduled < 1 for record in done.records)


def test_what_is_sent() -> None:
    got: list[Request] = []

    async def noting(request: Request, writer: asyncio.StreamWriter) -> None:
        got.append(request)
        answer(writer, scores(request))

    with serving(noting) as url:
        drive(f"{url}/prefix/", *SCORE, "target.cache=false", "target.model=ranker", key="sk-1")
    assert {request.path for request in got} == {"/prefix/v1/score"}
    assert {request.headers["authorization"] for request in got} == {"Bearer sk-1"}
    assert {request.headers["cache-control"] for request in got} == {"no-cache"}
    assert {request.body["model"] for request in got} == {"ranker"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_what_there_is(number: signal.Signals) -> None:
    heard = threading.Event()

    async def noting(request: Request, writer: asyncio.StreamWriter) -> None:
        heard.set()
        await hanging(request, writer)

    def interrupt() -> None:
        heard.wait(30)
        os.kill(os.getpid(), number)

    with serving(noting) as url:
        threading.Thread(target=interrupt).start()
        done = drive(url, *SCORE, "arrivals.rate=5", "duration_s=60")
    assert done.interrupted
    assert 0 < len(done.records) < 30
    assert {record.failure for record in done.records} == {"unfinished"}
