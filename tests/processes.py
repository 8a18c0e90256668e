"""Engines and gateways as real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
import msgspec

from engine import wire

START_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Program:
    """A process that serves HTTP, and a client of it."""

    def __init__(self, module: str, *arguments: str, port: int | None = None, **environment: str) -> None:
        self.port = port or free_port()
        command = [sys.executable, "-m", module, "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def wait_ready(self) -> Self:
        wait_until(self._ready, START_SECONDS)
        return self

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.process.stderr.read()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


class Pod(Program):
    """An engine."""

    def __init__(self, model: Path | str, *arguments: str, port: int | None = None) -> None:
        super().__init__("engine", "--model", str(model), *arguments, port=port)

    def ask(self, path: str, message: msgspec.Struct) -> tuple[int, wire.Reply]:
        response = self.client.post(path, content=wire.encode(message))
        return response.status_code, msgspec.msgpack.decode(response.content, type=wire.Reply)

    def read(self, path: str, kind: type):
        return msgspec.msgpack.decode(self.client.get(path).raise_for_status().content, type=kind)

    def stream(self, message: wire.Generate) -> list[wire.Reply]:
        reader = wire.FrameReader()
        with self.client.stream("POST", "/generate", content=wire.encode(message)) as response:
            replies = [reply for chunk in response.iter_raw() for reply in reader.feed(chunk)]
        assert reader.pending == 0
        return replies

    @property
    def loop_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
