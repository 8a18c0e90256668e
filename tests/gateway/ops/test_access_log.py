"""The access log: what its lines say, and that a reader who does not read holds nothing up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fcntl import F_SETPIPE_SZ, fcntl, ioctl
from pathlib import Path
from termios import FIONREAD
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, served
from tests.gateway.conftest import metric
from tests.gateway.keys import entry, write
from tests.processes import free_port, wait_until

KEY = "sk-very-secret"
SECRET = "zebra crossing"
CLOSE_SECONDS = 2.0
"""Longest wait for the last lines."""


@pytest.fixture(scope="module")
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
        command = [sys.executable, "-m", "yardstick_llm.gateway", "--engine", engine.url, "--port", str(port), *arguments]
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


@contextmanager
def started(engine: FakeEngine, stderr: Any, *arguments: str, **settings: str) -> Iterator[Gateway]:
    gateway = Gateway(engine, stderr, *arguments, **settings)
    try:
        yield gateway
    finally:
        gateway.client.close()
        gateway.process.kill()
        gateway.process.wait()


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Callable[..., Gateway]]:
    """A function that starts a gateway with another stderr or other settings."""
    with ExitStack() as stack:
        yield lambda stderr, **settings: stack.enter_context(started(engine, stderr, **settings))


@pytest.fixture(scope="module")
def logged(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Path]]:
    """A gateway with one key, and its log."""
    folder = tmp_path_factory.mktemp("log")
    keys = write(folder / "keys.json", entry(KEY, requests_per_minute=10) | {"name": "ci team"}, entry("other"))
    with (folder / "log").open("wb") as stderr, started(engine, stderr, api_keys_file=str(keys)) as gateway:
        yield gateway, folder / "log"


def access_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def test_each_request_is_one_line(engine: FakeEngine, logged: tuple[Gateway, Path]) -> None:
    gateway, file = logged
    engine.queue_seconds = 1.5
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
    wait_until(lambda: len(access_lines(file)) == 15)
    engine.faults.break_after, engine.queue_seconds = None, 0.0
    lines, text = access_lines(file), file.read_text()
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
        ("/v1/score", 429, "refused", "rate_limit_exceeded", "ci team", "fake", 0),
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
    assert [line["queue_seconds"] for line in lines[:4]] == [1.5, 0, 1.5, 1.5]
    assert (stream_line["prompt_tokens"], stream_line["completion_tokens"]) == (len(ids(SECRET)), len(engine.says) + 1)
    tokenized, detokenized = lines[5:7]
    assert (tokenized["prompt_tokens"], detokenized["prompt_tokens"]) == (len(ids(SECRET)), 2)
    assert 0 < stream_line["first_byte_seconds"] <= stream_line["total_seconds"] < 20
    assert all(line["time"].endswith("Z") for line in lines)


def test_a_client_that_leaves_is_logged(engine: FakeEngine, logged: tuple[Gateway, Path]) -> None:
    gateway, file = logged
    before = len(access_lines(file))
    engine.faults.delay = 5
    body, headers = {"query": [1], "items": [[2]], "label_token_ids": [1]}, {"authorization": "Bearer other"}
    with pytest.raises(httpx.ReadTimeout):
        gateway.client.post("/v1/score", json=body, headers=headers, timeout=0.5)
    wait_until(lambda: len(access_lines(file)) > before)
    line = access_lines(file)[-1]
    engine.faults.delay = 0
    assert (line["status"], line["outcome"], line["error"]) == (499, "client_gone", "client_closed_request")
    assert (line["model"], line["items"], line["prompt_tokens"]) == ("fake", 1, 2)


@pytest.mark.slow
def test_without_an_access_log(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as stderr:
        gateway = start(stderr, access_log="off")
    gateway.client.get("/v1/models")
    gateway.end()
    assert "listening at" in (tmp_path / "log").read_text()
    assert "/v1/models" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_holds_nothing_up(start: Callable[..., Gateway]) -> None:
    gateway = start(subprocess.PIPE)
    assert gateway.process.stderr is not None
    fcntl(gateway.process.stderr, F_SETPIPE_SZ, 4096)
    for _ in range(100):  # ten times as many lines as there is room for
        assert gateway.client.get("/v1/models").status_code == 200
    wait_until(lambda: filled(gateway))
    slowest = max(seconds_of(gateway, "/livez") for _ in range(20))
    assert slowest < 1
    assert gateway.end() < CLOSE_SECONDS + 5
    gateway.process.stderr.close()


def filled(gateway: Gateway) -> bool:
    """Whether the next lines do not fit into the pipe any more."""
    before = pipe_bytes(gateway)
    time.sleep(0.3)
    return 0 < before == pipe_bytes(gateway)


def pipe_bytes(gateway: Gateway) -> int:
    assert gateway.process.stderr is not None
    found = array("i", [0])
    ioctl(gateway.process.stderr, FIONREAD, found)
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
    wait_until(lambda: metric(gateway.client, "yardstick_log_lines_dropped_total") >= 50)
    gateway.end()
