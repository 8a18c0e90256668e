"""Settings from the environment and the command line, and the process that is made of them."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.fakes import FakeEngine, served
from tests.processes import wait_until
from yardstick_llm.gateway.server import main
from yardstick_llm.gateway.settings import Settings, SettingsError

URL = "http://127.0.0.1:1"
ONE = f"--engine {URL}"


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, "", "YARDSTICK_ENGINES (--engine): no engine is named"),
        ({"ENGINE": URL}, "", "YARDSTICK_ENGINE: there is no such setting; unset it, or use YARDSTICK_ENGINES"),
        ({"XXYYZZ": "1"}, "", "YARDSTICK_XXYYZZ: there is no such setting; unset it"),
        ({"PORT": "http"}, ONE, "YARDSTICK_PORT (--port): 'http' does not fit; expected `int`"),
        ({"PORT": "9"}, f"{ONE} --port 70000", "<= 65535"),
        ({"PROBE_SECONDS": "nan"}, "", "YARDSTICK_PROBE_SECONDS: 'nan' does not fit"),
        ({"MAX_BODY_BYTES": "0"}, ONE, ">= 1"),
        ({"ENGINES": f"{URL}, 127.0.0.1:8100"}, "", "YARDSTICK_ENGINES (--engine): '127.0.0.1:8100' is not a URL of an engine"),
        ({"REDIS_URL": "http://a"}, ONE, "YARDSTICK_REDIS_URL (--redis-url): it is not a URL of Redis; write it like"),
        ({}, f"{ONE} --redis-url redis://:secret@a:x/0", "it is not a URL of Redis"),
        ({}, f"{ONE} --redis-url redis://a/b", "'b' is not a database"),
        ({}, f"{ONE} --redis-url redis+cluster://a/1", "clusters have only one"),
        ({"REDIS_CA_FILE": "/no/such"}, ONE, "YARDSTICK_REDIS_CA_FILE: there is no file '/no/such'"),
        ({"REDIS_PREFIX": "a b"}, ONE, "YARDSTICK_REDIS_PREFIX: 'a b' does not fit"),
        *[({}, f"{ONE} --host {host}", "no API keys are set; name a file") for host in ("0.0.0.0", "::", "example.org")],
        *[
            ({"CORS_ORIGINS": origin}, ONE, "YARDSTICK_CORS_ORIGINS")
            for origin in ("app.example", "https://app.example/", "https://*.example", "ftp://x", "null", "https://")
        ],
    ],
)
def test_bad_settings_name_the_key_and_the_remedy_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str], flags: str, words: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"YARDSTICK_{name}", value)
    assert main(flags.split()) == 1
    told = capsys.readouterr().err
    assert told.startswith("gateway: ")
    assert words in told
    assert "secret" not in told
    assert told.count("\n") == 1


def test_loopback_needs_no_keys() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Settings(engines=(URL,), host=host).host == host


ADDRESSES = (
    "http://127.0.0.1:8100",
    "https://engines.example/",
    "dns://engines.default.svc:8100",
    "kubernetes://engines:http",
    "kubernetes://models/engines:8100",
)
NO_ADDRESSES = (
    *("", "engines:8100", "http://", "http://x:port", "ftp://x", "dns://engines", "dns://x:1/y"),
    *("kubernetes://engines", "kubernetes://a/b/c:1", "kubernetes://Engines:1", "kubernetes://engines:70000"),
)


def test_addresses_of_engines() -> None:
    assert Settings(engines=ADDRESSES).engines == ADDRESSES
    for text in NO_ADDRESSES:
        with pytest.raises(SettingsError, match=r"write it like|a port is"):
            Settings(engines=(text,))


@pytest.mark.slow
def test_the_process_serves_and_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the command line win over the environment."""
    monkeypatch.setenv("YARDSTICK_PORT", "1")
    with served(FakeEngine()) as url:
        monkeypatch.setenv("YARDSTICK_ENGINES", f"{url}, {URL}")
        command = [sys.executable, "-m", "yardstick_llm.gateway", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                base_url = next(found[1] for line in process.stderr if (found := re.search(r"listening at (http://\S+)", line)))
                with httpx.Client(base_url=base_url, transport=httpx.HTTPTransport(retries=5), timeout=20) as client:
                    wait_until(lambda: client.get("/readyz").status_code == 200, 60)
                    body = {"query": [1], "items": [[2]], "label_token_ids": [1]}
                    assert client.post("/v1/score", json=body).status_code == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=10) == 0
                assert "Traceback" not in process.stderr.read()
            finally:
                process.kill()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "yardstick_llm.gateway", "--engine", URL, "--port", str(port)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1
    in_use = f"cannot listen on port {port} of 127.0.0.1: address already in use"
    assert run.stderr == f"gateway: {in_use}; choose another with --port or --host\n"
