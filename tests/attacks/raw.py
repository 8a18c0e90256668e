"""HTTP by raw sockets, for requests that no client library sends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.processes import Program


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    rest: bytes
    """Everything that came after it on the connection."""

    @property
    def error(self) -> dict[str, Any]:
        body = json.loads(self.body)
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        return body["error"]


@contextmanager
def connected(program: Program, *, receive_buffer: int | None = None, timeout: float = 20) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(timeout)
        connection.connect(("127.0.0.1", program.port))
        yield connection


def request(target: str, body: bytes = b"", *, method: str = "POST", host: str = "localhost", **headers: str) -> bytes:
    """The bytes of a request; underscores in the names of ``headers`` stand for hyphens."""
    fields = {"host": host, "content-type": "application/json", "content-length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_to_end(connection: socket.socket, seconds: float = 10) -> bytes:
    """All bytes until the other side closes. Fails where it does not within ``seconds``."""
    end, received = time.monotonic() + seconds, b""
    while True:
        connection.settimeout(max(0.01, end - time.monotonic()))
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def read_answer(connection: socket.socket, seconds: float = 10) -> Answer:
    """One response with a length; the connection may stay open."""
    end, received = time.monotonic() + seconds, b""
    while True:
        head, found, rest = received.partition(b"\r\n\r\n")
        if found:
            length = int(fields(head).get("content-length", "0"))
            if len(rest) >= length:
                return parse(received)
        connection.settimeout(max(0.01, end - time.monotonic()))
        part = connection.recv(1 << 16)
        assert part, f"closed after {received[:200]!r}"
        received += part


def parse(received: bytes) -> Answer:
    """The first response in ``received``, which has a length."""
    head, found, rest = received.partition(b"\r\n\r\n")
    assert found, f"no response in {received[:200]!r}"
    headers = fields(head)
    length = int(headers.get("content-length", "0"))
    return Answer(int(head.split()[1]), headers, rest[:length], rest[length:])


def fields(head: bytes) -> dict[str, str]:
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head.decode().split("\r\n")[1:])}
