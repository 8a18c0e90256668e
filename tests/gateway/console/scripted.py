"""A server of the console whose answers a test writes, for answers that no gateway gives: slow, broken and hostile ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx

from tests.gateway.conftest import gateways

MODEL = {
    "id": "yardstick-demo",
    "max_model_len": 1024,
    "capabilities": ["score", "generate", "length_guidance"],
    "preset": {"name": "demo", "task": "rerank"},
}
Answer = Callable[["Connection"], None]
FOLDER = Path(__file__).parents[3] / "gateway" / "console"
KEPT = ("content-security-policy", "x-content-type-options", "referrer-policy")


class Connection(BaseHTTPRequestHandler):
    """One request. The test's functions write the response with :meth:`send` and :meth:`event`."""

    server: _Server

    def do_GET(self) -> None:
        if (file := self.server.files.get(self.path)) is not None:
            kept = {name: file.headers[name] for name in KEPT}
            self.send(200, file.headers["content-type"], file.content, **kept)
        elif self.path in self.server.answers:
            self.server.answers[self.path](self)
        else:
            self.send(404, "text/html", b"<h1>Not here</h1>")

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.answers[self.path](self)

    def send(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        """Send a whole response."""
        self.send_response(status)
        for header, value in {"content-type": kind, "content-length": str(len(content)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)

    def begin(self) -> None:
        """Begin a stream, which ends with the connection."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()

    def event(self, data: Any) -> None:
        """Send one event: an object, or text as it is."""
        self.wfile.write(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def wait_for_client_to_leave(self, seconds: float = 15) -> bool:
        """Send comments until the client has left. Returns False if it stays."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.wfile.write(b": still here\n\n")
            except OSError:
                return True
            time.sleep(0.02)
        return False

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def files() -> dict[str, httpx.Response]:
    """The files of the console as a gateway serves them, by path."""
    with gateways() as start:
        gateway = start(engines=("http://127.0.0.1:1",), wait=False)
        answers = {path: gateway.get(path) for path in ("/", *(f"/console/{file.name}" for file in FOLDER.iterdir()))}
        return {path: answer for path, answer in answers.items() if answer.is_success}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    files: dict[str, httpx.Response]
    answers: dict[str, Answer]

    def handle_error(self, *_: Any) -> None:
        """Clients may leave at any time."""


class ScriptedServer:
    """The server; ``answers`` has a function for each path."""

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), Connection)
        self._server.files = files()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, **answers: Answer | Any) -> str:
        """Set the answers by the last part of their path, such as ``rerank``: a function, or an object to send as JSON. Returns the
        URL."""
        paths = {"models": "/v1/models", "rerank": "/v1/rerank", "chat": "/v1/chat/completions", "metrics": "/metrics"}
        paths |= {"catalogues": "/v1/catalogues"}
        given = {"models": {"object": "list", "data": [MODEL]}} | answers
        self._server.answers = {paths[name]: answer if callable(answer) else _json(answer) for name, answer in given.items()}
        return self.url


def _json(content: Any) -> Answer:
    return lambda connection: connection.send(200, "application/json", json.dumps(content).encode())
