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
from typing import Any

import httpx
import pytest

from gateway.auth.keyring import KeyRing
from gateway.composition.load_settings import load_settings
from gateway.settings import Settings, SettingsError
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


def test_settings_come_from_environment_and_flags() -> None:
    environment = {"YARDSTICK_ENGINES": "http://a:1, https://b", "YARDSTICK_PORT": "9", "PATH": "x", "YARDSTICK_CACHE_BYTES": "5"}
    settings = load_settings(environment, {"port": 10, "host": None})
    assert settings == Settings(engines=("http://a:1", "https://b"), port=10, cache_bytes=5)


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, {}, "YARDSTICK_ENGINES (--engine): no engine is named"),
        ({"YARDSTICK_ENGINE": URL}, {}, "YARDSTICK_ENGINE: there is no such setting"),
        ({"YARDSTICK_PORT": "http"}, {"engines": [URL]}, "YARDSTICK_PORT (--port): 'http' does not fit; expected `int`"),
        ({"YARDSTICK_PORT": "70000"}, {"engines": [URL]}, "<= 65535"),
        ({"YARDSTICK_PROBE_SECONDS": "nan"}, {"engines": [URL]}, "YARDSTICK_PROBE_SECONDS: 'nan' does not fit"),
        ({"YARDSTICK_MAX_BODY_BYTES": "0"}, {"engines": [URL]}, ">= 1"),
        ({}, {"engines": ["127.0.0.1:8100"]}, "is not a URL of an engine"),
        (
            {},
            {"engines": [URL], "redis_url": "http://a"},
            "YARDSTICK_REDIS_URL (--redis-url): it is not a URL of Redis; write it like",
        ),
        ({}, {"engines": [URL], "redis_url": "redis://:secret@a:x/0"}, "it is not a URL of Redis"),
        ({}, {"engines": [URL], "redis_url": "redis://a/b"}, "'b' is not a database"),
        ({}, {"engines": [URL], "redis_url": "redis+cluster://a/1"}, "clusters have only one"),
        ({}, {"engines": [URL], "redis_ca_file": "/no/such"}, "YARDSTICK_REDIS_CA_FILE: there is no file '/no/such'"),
        ({"YARDSTICK_REDIS_PREFIX": "a b"}, {"engines": [URL]}, "YARDSTICK_REDIS_PREFIX: 'a b' does not fit"),
        ({}, {"engines": [URL], "host": "0.0.0.0"}, "no API keys are set; name a file of keys"),
        ({}, {"engines": [URL], "host": "::"}, "no API keys are set"),
        ({}, {"engines": [URL], "host": "example.org"}, "no API keys are set"),
    ],
)
def test_bad_settings_name_the_key_and_the_remedy(environment: dict[str, str], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(environment, flags)
    assert words in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_loopback_needs_no_keys() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Settings(engines=(URL,), host=host).host == host


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
