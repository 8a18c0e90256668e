"""Hostile and careless clients, as a program: ``python -m tests.attacks.hostile URL KEY SECONDS PAUSE [SEED [KIND]]``.

All behaviours run at once until SECONDS are over; each connection of the flood pauses for PAUSE seconds between two requests. With
the KIND ``schemas`` or ``images``, sixteen connections send only requests that cost much to refuse.
The last line of the output is JSON: the number of answers by behaviour and status, and every 5xx that is not a 503 with
``Retry-After``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO

import aiohttp
from PIL import Image as Pillow

from tests.pictures import data_url

FLOOD_CONNECTIONS = 24
GRAMMAR_CONNECTIONS = 4
EXPENSIVE_CONNECTIONS = 16
SLOW_MULTIPLE = 180_001
"""Least ``multipleOf`` of a schema whose compiling takes a second."""
MIB = 1024 * 1024
Behaviour = Callable[[], Awaitable[None]]


@dataclass
class Hostile:
    """One hostile process: where it sends its requests, and the answers that it got."""

    url: str
    key: str
    pause: float
    seed: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """5xx answers other than 503 with Retry-After."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._host, _, port = self.url.removeprefix("http://").partition(":")
        self._port = int(port)

    async def run(self, seconds: float, kind: str = "") -> None:
        """Run every behaviour, or those of ``kind``, again and again for ``seconds``."""
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {self.key}"}, timeout=timeout) as self._session:
            if kind:
                behaviour = {"schemas": self.schemas, "images": self.images}[kind]
                runs = [self._repeat(behaviour, seconds, pause=self.pause) for _ in range(EXPENSIVE_CONNECTIONS)]
                await asyncio.gather(*runs)
                return
            runs = [self._repeat(self.flood, seconds, pause=self.pause) for _ in range(FLOOD_CONNECTIONS)]
            others = (
                self.leave_a_stream,
                self.leave_an_upload,
                self.upload_slowly,
                self.tiny,
                self.huge,
                self.header_bomb,
                self.mix,
                *[self.new_grammars] * GRAMMAR_CONNECTIONS,
                self.schemas,
                self.images,
            )
            runs += [self._repeat(behaviour, seconds, pause=0.5) for behaviour in others]
            runs += [self._repeat(self.upload_slowly, seconds, pause=0.5) for _ in range(4)]
            await asyncio.gather(*runs)

    async def _repeat(self, behaviour: Behaviour, seconds: float, *, pause: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with suppress(aiohttp.ClientError, OSError, TimeoutError, EOFError):
                async with asyncio.timeout(left + 5):
                    await behaviour()
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))

    async def flood(self) -> None:
        """Ask for far more scores than the key's share, without caching."""
        items = [[self._random.randrange(3, 250) for _ in range(20)] for _ in range(10)]
        await self._post("flood", "score", {"query": [5] * 30, "items": items, "label_token_ids": [3, 4]})

    async def leave_a_stream(self) -> None:
        """Begin a long stream and leave after its first bytes."""
        body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            self._count("leave_a_stream", answer)
            await answer.content.readany()

    async def leave_an_upload(self) -> None:
        """Promise a body, send a part of it, and leave."""
        async with self._connection(16 * MIB) as writer:
            writer.write(b"x" * self._random.randrange(1, 200_000))
            await writer.drain()

    async def upload_slowly(self) -> None:
        """Promise a megabyte and send some bytes a second."""
        async with self._connection(MIB) as writer:
            for _ in range(10):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(1)

    async def tiny(self) -> None:
        for body in (b"", b"{", b"[]", b'{"query": 1}', b"\xff"):
            await self._post("tiny", self._random.choice(["score", "completions", "chat/completions", "length"]), body)

    async def huge(self) -> None:
        """Send a body as large as the server takes."""
        size = self._random.choice([2, 8, 20]) * MIB
        bodies = (
            ("score", {"query": "a " * (size // 2), "items": ["x"], "labels": [" Yes"]}),
            ("score", {"query": [5] * 15_000, "items": [[]] * 10_000, "label_token_ids": [3]}),
            ("score", {"query": "q", "items": ["x"], "labels": ["y" * size]}),
            ("completions", {"prompt": "b " * (size // 2)}),
            ("completions", {"prompt": ["a"] * 1024, "n": 128}),
            ("chat/completions", {"messages": [{"role": "user", "content": "c " * (size // 2)}]}),
        )
        path, body = self._random.choice(bodies)
        await self._post("huge", path, body)

    async def header_bomb(self) -> None:
        _, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"POST /v1/score HTTP/1.1\r\nhost: x\r\n")
            for number in range(2000):
                writer.write(b"x-%d: " % number + b"y" * 8000 + b"\r\n")
                await writer.drain()
        finally:
            writer.close()

    async def new_grammars(self) -> None:
        """Ask for outputs that follow new schemas. Ten take tens of milliseconds each to compile, and one would take minutes."""
        numbers = [self._random.randrange(3001, 60_001, 2) for _ in range(10)]
        for number in (*numbers, self._random.randrange(10**8 + 7, 10**9)):
            schema = {"type": "array", "items": {"type": "integer", "multipleOf": number}}
            await self._post("new_grammars", "completions", {"prompt": [5, 6, 7], "max_tokens": 1, "guided_json": schema})

    async def mix(self) -> None:
        """Ask for a model that does not exist, with a wrong key, and at a wrong path."""
        await self._post("mix", "score", {"model": "none", "query": "q", "items": ["x"], "labels": [" Yes"]})
        async with self._session.post(f"{self.url}/v1/score", headers={"authorization": "Bearer wrong"}, json={}) as answer:
            self._count("mix", answer)
        async with self._session.get(f"{self.url}/nothing") as answer:
            self._count("mix", answer)

    async def schemas(self) -> None:
        """Ask for JSON of a schema that is new and takes long to compile."""
        multiple = SLOW_MULTIPLE + 2 * self._random.randrange(1 << 19)
        schema = {"type": "array", "items": {"type": "integer", "multipleOf": multiple}}
        await self._post("schemas", "chat/completions", {"messages": HELLO, "max_tokens": 1, "guided_json": schema})

    async def images(self) -> None:
        url = data_url(jpeg_of_scans(1190), "jpeg")
        await self._post("images", "chat/completions", chat_with_image(url))

    async def _post(self, name: str, path: str, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        async with self._session.post(f"{self.url}/v1/{path}", data=data, headers=headers) as answer:
            self._count(name, answer)
            await answer.read()

    def _count(self, name: str, answer: aiohttp.ClientResponse) -> None:
        self.answers[f"{name} {answer.status}"] += 1
        if answer.status >= 500 and not (answer.status == 503 and "retry-after" in answer.headers):
            self.faults.append(f"{name}: {answer.status}")

    @asynccontextmanager
    async def _connection(self, length: int) -> AsyncIterator[asyncio.StreamWriter]:
        """A connection on which the headers of a score request with a body of ``length`` bytes were sent."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST /v1/score HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {self.key}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode())
        try:
            yield writer
        finally:
            writer.close()


HELLO = [{"role": "user", "content": "hello"}]


def chat_with_image(url: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], "max_tokens": 1}


@cache
def jpeg_of_scans(scans: int, side: int = 5792) -> bytes:
    """Return a progressive grey JPEG of ``side`` x ``side`` pixels with ``scans`` additional scans, of 53 bytes each by default."""
    file = BytesIO()
    Pillow.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * scans + whole[-2:]


def command(niceness: int = 19) -> list[str]:
    """Start this program. Hostile clients have their own processors, so by default it takes none from the servers."""
    return ["nice", "-n", str(niceness), sys.executable, "-m", "tests.attacks.hostile"]


def main() -> None:
    url, key, seconds, pause, seed, kind, *_ = [*sys.argv[1:], "0", ""] if len(sys.argv) < 6 else [*sys.argv[1:], ""]
    hostile = Hostile(url, key, float(pause), int(seed))
    asyncio.run(hostile.run(float(seconds), kind))
    print(json.dumps({"answers": hostile.answers, "faults": hostile.faults}))


if __name__ == "__main__":
    main()
