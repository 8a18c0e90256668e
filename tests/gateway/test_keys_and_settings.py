"""API keys, settings, and the process that is made of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.http.auth import KeyRing
from gateway.settings import SettingsError
from tests.fakes import FakeEngine, served
from tests.gateway.conftest import Start
from tests.processes import wait_until

URL = "http://127.0.0.1:1"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with the keys ``alpha`` and ``beta``."""
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("alpha", "beta")]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    return path


def test_keys_open_v1_and_nothing_else_needs_one(start: Start, key_file: Path) -> None:
    engine = FakeEngine()
    client = start(engine, api_keys_file=key_file)
    for path in ("/livez", "/readyz", "/health", "/ping", "/version", "/metrics", "/schema"):
        assert client.get(path).status_code == 200
    for header in (None, "Bearer gamma", "Bearer", "alpha", "Basic alpha", "Bearer alpha beta", "Bearer älpha"):
        headers = {"authorization": header.encode()} if header else {}
        for answer in (client.get("/v1/models", headers=headers), client.post("/v1/score", json={}, headers=headers)):
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for header in ("Bearer alpha", "bearer beta", "Bearer  beta"):
        assert client.get("/v1/models", headers={"authorization": header}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"keys": [{"name": "a", "sha256": "12"}]}',
        '{"keys": [{"name": "a", "key": "secret"}]}',
        '{"keys": [], "x": 1}',
    ],
)
def test_files_that_hold_no_keys(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"keys\.json: not a file of API keys .*write \{"):
        KeyRing(path)
    with pytest.raises(SettingsError, match="No such file"):
        KeyRing(tmp_path / "none.json")


@pytest.fixture
def process(engine: FakeEngine) -> Iterator[subprocess.Popen[str]]:
    """``python -m gateway`` before ``engine``, on a free port."""
    with served(engine) as url:
        command = [sys.executable, "-m", "gateway", "--engine", url, "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            yield running
            running.kill()


def test_the_process_serves_and_ends_in_order(process: subprocess.Popen[str], engine: FakeEngine) -> None:
    assert process.stderr is not None
    base_url = next(found[1] for line in process.stderr if (found := re.search(r"listening at (http://\S+)", line)))
    with httpx.Client(base_url=base_url) as client:
        wait_until(lambda: client.get("/livez").status_code == 200)
        wait_until(lambda: client.get("/readyz").status_code == 200)
        body = {"query": [1], "items": [[2]], "label_token_ids": [1]}
        assert client.post("/v1/score", json=body).status_code == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "gateway", "--engine", URL, "--port", str(port)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1
    in_use = f"cannot listen on port {port} of 127.0.0.1: address already in use"
    assert run.stderr == f"gateway: {in_use}; choose another with --port or --host\n"


def test_bad_settings_end_the_process_with_one_line() -> None:
    command = [sys.executable, "-m", "gateway"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, "YARDSTICK_ENGINES": "x"})
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("gateway: YARDSTICK_ENGINES (--engine): 'x' is not a URL of an engine")
