"""Commands that run in this process, and servers for them."""

from __future__ import annotations

import io
import json
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways
from yardstick_llm.gateway import cli

EMBEDDING = 'name = "own"\ntask = "embed"\ntemplate = ["{document}"]\n'
RERANK = 'name = "own"\ntask = "rerank"\ntemplate = ["{query}: {document}"]\nlabels = [" Yes", " No"]\nactivation = "softmax"\n'


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str


Yardstick = Callable[..., Done]


@pytest.fixture
def yardstick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Yardstick:
    """Runs ``yardstick`` with arguments, as its console script does, and with ``text`` on its standard input."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object, text: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["yardstick", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        return Done(status, *capsys.readouterr())

    return run


def the_one_line(done: Done) -> str:
    (line,) = done.err.splitlines()
    assert line.startswith("yardstick: ")
    return line


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process may have 50 bytes, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass(frozen=True)
class Served:
    """A gateway before a fake engine."""

    engine: FakeEngine
    url: str


@pytest.fixture(scope="module")
def embedder() -> Iterator[Served]:
    engine = FakeEngine(capabilities=("embed",), embedding_size=6, preset=EMBEDDING)
    with gateways() as start:
        yield Served(engine, str(start(engine).base_url))


@pytest.fixture(scope="module")
def reranker() -> Iterator[Served]:
    engine = FakeEngine(preset=RERANK)
    with gateways() as start:
        yield Served(engine, str(start(engine).base_url))


Reply = tuple[int, dict[str, str], Any]
"""Status, headers and JSON body."""


async def read_json(receive: Any) -> Any:
    """The body of a request of an ASGI server."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return json.loads(body or "{}")


async def send_json(send: Any, status: int, headers: dict[str, str], answer: Any) -> None:
    content = json.dumps(answer).encode()
    given = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": content})


@dataclass
class Embeddings:
    """An ASGI server of embeddings, each the length of its text; ``before`` may answer instead, wait, or raise
    ConnectionError."""

    before: Callable[[Embeddings, list[str]], Awaitable[Reply | None]] | None = None
    requests: int = 0
    running: int = 0
    most_running: int = 0
    texts: list[str] = field(default_factory=list)
    """Texts that were embedded, in the order of the answers."""
    remember: bool = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.requests += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            texts = (await read_json(receive))["input"]
            status, headers, answer = (self.before and await self.before(self, texts)) or self._embedded(texts)
        except ConnectionError:  # the connection breaks in the answer
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise
        finally:
            self.running -= 1
        await send_json(send, status, headers, answer)

    def _embedded(self, texts: list[str]) -> Reply:
        if self.remember:
            self.texts += texts
        entries = [{"index": index, "embedding": [len(text) / 8, 0.5]} for index, text in enumerate(texts)]
        return 200, {}, {"data": entries[::-1]}


def error(status: int, message: str, *, param: str | None = None, **headers: str) -> Reply:
    """An error answer; underscores of header names stand for hyphens."""
    body = {"error": {"message": message, "type": "test", "param": param, "code": "told"}}
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


def write_texts(path: Path, count: int) -> Path:
    """A JSON Lines file with the texts ``a``, ``bb``, ... of lengths up to 50."""
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": f"{number} " + "x" * (number % 50)}) + "\n" for number in range(count))
    return path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text, "the last line is whole"
    return [json.loads(line) for line in text.splitlines()]
