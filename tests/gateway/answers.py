"""Reads what gateways answer, and what programs for clients print."""

from __future__ import annotations

import gc
import io
import json
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, library


def rendered(engine: FakeEngine) -> str:
    """The prompt of the last generation, as text."""
    return library().decode(engine.generates[-1].prompt, skip_special_tokens=False)


def told(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, once its shape is checked."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]
    return body["error"]


def check_refused(answer: httpx.Response, param: str | None, words: str = "", status: int = 400) -> None:
    """The answer is an error that names the field, with these words in its message."""
    assert answer.status_code == status, answer.text
    error = told(answer)
    assert (error["param"], words in error["message"]) == (param, True), error


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, parsed. It ends with ``[DONE]``, or with an error as its last event."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = answer.text.split("\n\n")
    data = [line.removeprefix("data: ") for line in lines]
    done = data[-1] == "[DONE]"
    found = [json.loads(each) for each in (data[:-1] if done else data)]
    assert end == ""
    assert done or "error" in found[-1]
    return found


def printed_by(program: str, *arguments: str) -> str:
    """Run a client's program in this process, which has imported the clients already, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["program", *arguments])
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        gc.collect()  # clients that it leaves open
    return out.getvalue()


@contextmanager
def asking(client: httpx.Client, path: str, body: Any, **headers: str) -> Iterator[socket.socket]:
    """A connection on which a request was sent. The client leaves at the end of the block."""
    content = json.dumps(body).encode()
    fields = {"host": "localhost", "content-length": str(len(content))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield connection
