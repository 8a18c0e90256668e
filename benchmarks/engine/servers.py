"""Runs an engine and a gateway as processes, as in production."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.processes import free_port
from yardstick_llm.engine import wire

START_SECONDS = 120
STOP_SECONDS = 10


class ServerError(RuntimeError):
    """A server did not start or does not answer; the message has its last output, if any."""


@contextmanager
def serving(directory: Path, engine_flags: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield the URLs of a gateway and of the one engine behind it, which serves the model in ``directory``; both are ended
    afterwards. Raises :class:`ServerError`."""
    engine_port, gateway_port = free_port(), free_port()
    engine = ["engine", "--port", str(engine_port), "--model", str(directory), "--name", "bench", *engine_flags]
    gateway = ["gateway", "--port", str(gateway_port), "--engine", _url(engine_port)]
    with _process(engine, engine_port), _process(gateway, gateway_port):
        yield _url(gateway_port), _url(engine_port)


def describe_engine(url: str) -> dict[str, Any]:
    """Describe the backend of a running engine, in the form of :attr:`benchmarks.engine.engines.Engine.description`."""
    info = msgspec.msgpack.decode(httpx.get(f"{url}/info", timeout=5, trust_env=False).content, type=wire.Info)
    metrics = httpx.get(f"{url}/metrics", timeout=5, trust_env=False).text
    counts = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line and not line.startswith("#")}
    names = "steps", "replayed_steps", "replayed_lenvm_passes"
    steps = {name: int(counts.get(f"yardstick_engine_{name}_total", 0)) for name in names}
    return {"attention": msgspec.to_builtins(info.attention), **steps}


@contextmanager
def _process(arguments: Sequence[str], port: int) -> Iterator[None]:
    """Yield one of our programs when it is ready."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("YARDSTICK_")}
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", f"yardstick_llm.{arguments[0]}", *arguments[1:]]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603 - our own modules
        try:
            _wait_until_ready(process, port)
            yield
        except ServerError as error:
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines()[-5:]
            raise ServerError("\n".join([str(error), *words])) from None
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"{_url(port)}/readyz", timeout=5, trust_env=False).status_code == 200:
                return
        if process.poll() is not None:
            raise ServerError(f"a server ended with exit code {process.returncode} before it was ready:")
        if time.monotonic() > end:
            raise ServerError(f"a server was not ready after {START_SECONDS} s:")
        time.sleep(0.1)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
