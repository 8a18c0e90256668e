"""Engines behind a TLS terminator: streams and all other calls are encrypted, and the certificate is checked."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, served
from tests.processes import Program, wait_until
from tests.redis import Certificates


class CountingContext(ssl.SSLContext):
    """Counts the handshakes that begin."""

    begun = 0

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        self.begun += 1
        return super().wrap_bio(*arguments, **options)


class Terminator:
    """Accepts TLS connections and passes their bytes to a plain port."""

    def __init__(self, port: int, certificates: Certificates) -> None:
        self.url = ""
        self.handshakes = 0
        """Handshakes that succeeded."""
        self._port = port
        self.tls = CountingContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(*certificates.chain)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event

    @contextmanager
    def running(self) -> Iterator[Terminator]:
        thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        thread.start()
        assert self._ready.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            thread.join()

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self.tls) as server:
            self.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._end.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handshakes += 1
        behind, ahead = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.wait(
                [asyncio.create_task(_copy(reader, ahead)), asyncio.create_task(_copy(behind, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for each in (writer, ahead):
                each.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def terminator(certificates: Certificates) -> Iterator[Terminator]:
    with served(FakeEngine()) as url, Terminator(httpx.URL(url).port or 0, certificates).running() as terminator:
        yield terminator


def test_scores_and_streams_are_encrypted(terminator: Terminator, certificates: Certificates) -> None:
    program = Program("gateway", "--engine", terminator.url, SSL_CERT_FILE=str(certificates.ca))
    try:
        client = program.wait_ready().client
        score = {"query": "red", "items": [" shoes"], "label_token_ids": [5]}
        assert client.post("/v1/score", json=score).status_code == 200
        before = terminator.handshakes
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
        for _ in range(3):
            assert client.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
        opened = terminator.handshakes - before
        assert opened <= 2, "requests share a connection, which is opened again if the machine stalls for two seconds"
    finally:
        program.close()


def test_a_certificate_of_another_authority_is_refused(terminator: Terminator, tmp_path: Path) -> None:
    other = Certificates(tmp_path)
    program = Program("gateway", "--engine", terminator.url, SSL_CERT_FILE=str(other.ca))
    before, begun = terminator.handshakes, terminator.tls.begun
    try:
        wait_until(lambda: terminator.tls.begun > begun + 1, 40)
        assert program.client.get("/readyz").status_code == 503
        assert terminator.handshakes == before
    finally:
        program.close()
