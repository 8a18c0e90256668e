"""The access log: what its lines say, and that a reader who does not read holds nothing up."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.http.context import RequestContext
from gateway.ops.access_log import AccessLog
from gateway.ops.log_writer import CLOSE_SECONDS, MAX_LINES, LineWriter
from tests.attacks.watch import tree_mib
from tests.fakes import FakeEngine, ids, served
from tests.processes import free_port, wait_until

KEY = "sk-very-secret"
SECRET = "zebra crossing"
DROPPED = "yardstick_log_lines_dropped_total"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    with served(engine) as url:
        engine.url = url
        yield engine


class Gateway:
    """A gateway process whose stderr goes where the test says."""

    def __init__(self, engine: FakeEngine, stderr: Any, *arguments: str, **settings: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        environment = os.environ | {f"YARDSTICK_{name.upper()}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "gateway", "--engine", engine.url, "--port", str(port), *arguments]
        self.process = subprocess.Popen(command, stderr=stderr, env=environment)
        self.client = httpx.Client(base_url=self.url, timeout=20)
        wait_until(self._ready, 60)

    def _ready(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> float:
        """Ask it to end; the seconds that it took."""
        self.client.close()
        began = time.monotonic()
        self.process.terminate()
        assert self.process.wait(20) == 0
        return time.monotonic() - began


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Callable[..., Gateway]]:
    gateways: list[Gateway] = []

    def start_gateway(stderr: Any, *arguments: str, **settings: str) -> Gateway:
        gateways.append(Gateway(engine, stderr, *arguments, **settings))
        return gateways[-1]

    yield start_gateway
    for gateway in gateways:
        gateway.client.close()
        gateway.process.kill()
        gateway.process.wait()


def access_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def test_each_request_is_one_line(engine: FakeEngine, start: Callable[..., Gateway], tmp_path: Path) -> None:
    file, keys = tmp_path / "log", tmp_path / "keys.json"
    entry = {"name": "ci team", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "requests_per_minute": 10}
    keys.write_text(json.dumps({"keys": [entry]}))
    with file.open("wb") as stderr:
        gateway = start(stderr, "--api-keys-file", str(keys), access_log="json")
    client, engine.says = gateway.client, ids("red running")
    sent = {"authorization": f"Bearer {KEY}"}
    score = {"query": SECRET, "items": ["a", "b"], "labels": [" Yes"]}
    client.post("/v1/score", json=score, headers=sent | {"x-request-id": "mine-1"})
    client.post("/v1/score", json=score, headers=sent)
    stream = {"prompt": SECRET, "stream": True, "max_tokens": 8}
    client.post("/v1/completions", json=stream, headers=sent)
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}]}, headers=sent)
    client.post("/v1/length", json={"input": [SECRET, "b", "c"]}, headers=sent)
    client.post("/tokenize", json={"prompt": SECRET}, headers=sent)
    client.post("/v1/detokenize", json={"tokens": [5, 6]}, headers=sent)
    client.post("/v1/score", json=score | {"model": "missing"}, headers=sent)
    client.post("/v1/score", json=score | {"items": [SECRET * 999]}, headers=sent)
    engine.faults.break_after = 1
    client.post("/v1/completions", json=stream, headers=sent)
    client.post("/v1/score", json=score, headers=sent)  # one too many
    client.post("/v1/score", json=score)
    client.get(f"/nowhere/{SECRET}")
    client.get("/v1/models/fake", headers=sent)
    for path in ("/livez", "/health", "/ping"):
        client.get(path)
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(f"{SECRET} HTTP/1.1\r\n\r\n".encode())
        refused = connection.recv(1 << 16)
    gateway.end()
    lines = access_lines(file)
    text = file.read_text()
    assert SECRET not in text
    assert "zebra" not in text
    assert KEY not in text
    assert "nowhere" not in text
    told = [
        (line["endpoint"], line["status"], line["outcome"], line["error"], line["key"], line["model"], line["items"])
        for line in lines
    ]
    assert told == [
        ("/v1/score", 200, "ok", None, "ci team", "fake", 2),
        ("/v1/score", 200, "ok", None, "ci team", "fake", 2),
        ("/v1/completions", 200, "ok", None, "ci team", "fake", 0),
        ("/v1/chat/completions", 200, "ok", None, "ci team", "fake", 0),
        ("/v1/length", 200, "ok", None, "ci team", "fake", 3),
        ("/tokenize", 200, "ok", None, "ci team", "fake", 0),
        ("/v1/detokenize", 200, "ok", None, "ci team", "fake", 0),
        ("/v1/score", 404, "refused", "model_not_found", "ci team", None, 0),
        ("/v1/score", 400, "refused", "context_length_exceeded", "ci team", "fake", 0),
        ("/v1/completions", 200, "broken_stream", "engine_lost", "ci team", "fake", 0),
        ("/v1/score", 429, "refused", "rate_limit_exceeded", "ci team", "fake", 2),
        ("/v1/score", 401, "refused", "invalid_api_key", None, None, 0),
        ("none", 404, "refused", "not_found", None, None, 0),
        ("/v1/models/{model}", 200, "ok", None, "ci team", None, 0),
        ("none", 400, "refused", "invalid_request_error", None, None, 0),
    ]
    assert f"x-request-id: {lines[-1]['id']}\r\n" in refused.decode()
    first, second, stream_line = lines[:3]
    assert first["id"] == "mine-1"
    prompt = sum(len(ids(SECRET + item)) for item in "ab")
    assert (first["prompt_tokens"], first["cache_hits"], second["cache_hits"]) == (prompt, 0, 2)
    assert second["cached_tokens"] == prompt
    assert (stream_line["prompt_tokens"], stream_line["completion_tokens"]) == (len(ids(SECRET)), len(engine.says) + 1)
    tokenized, detokenized = lines[5:7]
    assert (tokenized["prompt_tokens"], detokenized["prompt_tokens"]) == (len(ids(SECRET)), 2)
    assert 0 < stream_line["first_byte_seconds"] <= stream_line["total_seconds"] < 20
    assert all(line["time"].endswith("Z") for line in lines)


def test_the_time_in_the_queue_of_an_engine_is_told(
    engine: FakeEngine, start: Callable[..., Gateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.queue_seconds = 1.5
    with (tmp_path / "log").open("wb") as stderr:
        gateway = start(stderr, access_log="json")
    for stream in (False, True):
        gateway.client.post("/v1/completions", json={"prompt": "a", "stream": stream, "max_tokens": 40})
    gateway.end()
    assert [line["queue_seconds"] for line in access_lines(tmp_path / "log")] == [1.5, 1.5]


def test_a_client_that_leaves_is_logged(engine: FakeEngine, start: Callable[..., Gateway], tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as stderr:
        gateway = start(stderr, access_log="json")
    engine.faults.delay = 5
    with pytest.raises(httpx.ReadTimeout):
        gateway.client.post("/v1/score", json={"query": [1], "items": [[2]], "label_token_ids": [1]}, timeout=0.5)
    wait_until(lambda: len(access_lines(tmp_path / "log")) == 1)
    (line,) = access_lines(tmp_path / "log")
    assert (line["status"], line["outcome"], line["error"]) == (499, "client_gone", "client_closed_request")
    assert (line["model"], line["items"], line["prompt_tokens"]) == ("fake", 1, 2)


@pytest.mark.slow
def test_text_without_probes(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as stderr:
        gateway = start(stderr, access_log="text")
    gateway.client.get("/v1/models", headers={"x-request-id": "mine"})
    gateway.end()
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if " access " in line]
    pairs = dict(pair.split("=") for pair in line.split(" ")[2:])
    assert pairs.keys() == {"id", "endpoint", "status", "outcome", "first_byte_seconds", "total_seconds"}
    assert (pairs["id"], pairs["endpoint"], pairs["status"], pairs["outcome"]) == ("mine", "/v1/models", "200", "ok")


@pytest.mark.slow
def test_without_an_access_log(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as stderr:
        gateway = start(stderr, access_log="off")
    gateway.client.get("/v1/models")
    gateway.end()
    assert "listening at" in (tmp_path / "log").read_text()
    assert "/v1/models" not in (tmp_path / "log").read_text()


def test_values_cannot_forge_a_line() -> None:
    lines: list[bytes] = []

    class Kept(LineWriter):
        def put(self, line: Any) -> None:
            lines.append(line())

    context = RequestContext(b"id")
    context.account.model = 'a model"\nid=forged'
    AccessLog(Kept(2), "text").ended(context, "/v1/score", 1.0)
    AccessLog(Kept(2), "json").ended(context, "/v1/score", 1.0)
    assert all(line.count(b"\n") == 1 for line in lines)
    assert b'model="a model\\"\\nid=forged"' in lines[0]


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_holds_nothing_up(start: Callable[..., Gateway]) -> None:
    gateway = start(subprocess.PIPE)
    assert gateway.process.stderr is not None
    wait_until(lambda: filled(gateway))
    slowest = max(seconds_of(gateway, "/livez") for _ in range(20))
    assert slowest < 1
    assert gateway.end() < CLOSE_SECONDS + 5
    gateway.process.stderr.close()


def filled(gateway: Gateway) -> bool:
    """Whether the pipe is full: a thread of the gateway waits to write to it."""
    for _ in range(100):
        assert gateway.client.get("/v1/models").status_code == 200
    threads = Path(f"/proc/{gateway.process.pid}/task").glob("*/wchan")
    return any(thread.read_text() in ("pipe_write", "anon_pipe_write") for thread in threads) or pipe_bytes(gateway) > 60_000


def pipe_bytes(gateway: Gateway) -> int:
    import array
    import fcntl
    import termios

    assert gateway.process.stderr is not None
    found = array.array("i", [0])
    fcntl.ioctl(gateway.process.stderr, termios.FIONREAD, found)
    return found[0]


def seconds_of(gateway: Gateway, path: str) -> float:
    began = time.monotonic()
    gateway.client.get(path).raise_for_status()
    return time.monotonic() - began


@pytest.mark.slow
def test_a_full_disk_costs_lines_and_nothing_else(start: Callable[..., Gateway]) -> None:
    with Path("/dev/full").open("wb") as stderr:
        gateway = start(stderr)
    for _ in range(50):
        assert gateway.client.get("/v1/models").status_code == 200
    wait_until(lambda: gateway_metric(gateway, DROPPED) >= 50)
    gateway.end()


def gateway_metric(gateway: Gateway, name: str) -> float:
    lines = gateway.client.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    read, write = os.pipe()
    line = b"x" * 199 + b"\n"
    with LineWriter(write) as writer:
        before = tree_mib(os.getpid())
        began = time.monotonic()
        for _ in range(200_000):
            writer.put(line)
        assert time.monotonic() - began < 5
        assert writer.dropped > 200_000 - MAX_LINES - 2000
        assert tree_mib(os.getpid()) - before < 20
        ends = time.monotonic()
    assert time.monotonic() - ends < CLOSE_SECONDS + 1
    os.close(read)  # ends the thread's write
    wait_until(lambda: not any(thread.name == "log" for thread in threading.enumerate()))
    os.close(write)


def test_a_pipe_that_is_not_blocking_gets_every_line() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    received = bytearray()
    with LineWriter(theirs.fileno()) as writer:
        for number in range(5000):
            writer.put(b"%04d %b\n" % (number, b"x" * 200))
        while received.count(b"\n") < 5000:
            received += ours.recv(1 << 16)
    assert [line[:4] for line in received.splitlines()] == [b"%04d" % number for number in range(5000)]
    assert writer.dropped == 0
    ours.close()
    theirs.close()


def test_the_last_lines_are_written_at_the_end() -> None:
    read, write = os.pipe()
    with LineWriter(write) as writer:
        writer.put(b"first\n")
        writer.put(lambda: b"last\n")
    os.close(write)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"first\nlast\n"


@pytest.mark.alone
def test_a_line_costs_less_than_ten_microseconds() -> None:
    """On the event loop; with the thread that encodes and writes it, less than 25."""
    context = RequestContext(b"0123456789abcdef" * 2)
    context.status, context.first_byte = 200, context.began + 0.001
    context.account.model = "model"
    count, best_here, best_all = 2000, float("inf"), float("inf")
    with Path(os.devnull).open("wb") as file:
        for _ in range(5):
            with LineWriter(file.fileno()) as writer:
                log = AccessLog(writer, "json")
                everything, here = time.process_time(), time.thread_time()
                for _ in range(count):
                    log.ended(context, "/v1/score", 0.0012)
                here = time.thread_time() - here
            best_here, best_all = min(best_here, here / count), min(best_all, (time.process_time() - everything) / count)
    assert best_here < 10e-6
    assert best_all < 25e-6
