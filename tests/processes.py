"""Engines and gateways as real processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
import msgspec

from yardstick_llm.engine import wire

START_SECONDS = 120


def free_port() -> int:
    """A port of 127.0.0.1 that stays free for about a minute.

    A connection to the port leaves it in TIME_WAIT, so the kernel gives it to no other process that asks for any free port. Servers
    can still listen on it, as they set SO_REUSEADDR.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            accepted.close()  # first, so that this end, which has the port, keeps TIME_WAIT
        return listener.getsockname()[1]


class Program:
    """A process that serves HTTP, and a client of it."""

    def __init__(
        self, module: str, *arguments: str, port: int | None = None, directory: Path | None = None, **environment: str
    ) -> None:
        """``directory``: the checkout that ``module`` is imported from; None for the current one."""
        self.port = port or free_port()
        old = directory is not None and not (directory / "src").is_dir()  # a checkout from before there was the package
        if not module.startswith(("tests.", "benchmarks.")) and not old:
            module = f"yardstick_llm.{module}"
        command = [sys.executable, "-m", module, "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def wait_ready(self) -> Self:
        wait_until(self._ready, START_SECONDS, pause=0.05)  # each look costs CPU that the program needs to start
        return self

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.process.stderr.read()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


class Pod(Program):
    """An engine."""

    def __init__(self, model: Path | str, *arguments: str, port: int | None = None, **environment: str) -> None:
        super().__init__("engine", "--model", str(model), *arguments, port=port, **environment)

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
        return int(children[-1])  # after the warm process, if it has one


@contextmanager
def gateway_before(*pods: Pod, **environment: str) -> Iterator[Program]:
    """A gateway that has found ``pods``, which may still be starting."""
    entries = [word for pod in pods for word in ("--engine", pod.wait_ready().url)]
    with Program("gateway", *entries, **environment) as gateway:
        gateway.wait_ready()
        wait_until(lambda: f"yardstick_engines_ready {len(pods)}.0" in gateway.client.get("/metrics").text, 60)
        yield gateway


def wait_until(condition: Callable[[], object], seconds: float = 10.0, pause: float = 0.01) -> None:
    """Return when ``condition`` holds; fail when it does not in time. ``pause``: seconds between two looks."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(pause)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is waited for sets no event
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
