"""The shared cache: results in Redis, under a name that says everything they depend on.

An entry is ``PREFIX:score:`` and the 16 bytes of its key (``gateway/scoring/keys.py``: engine fingerprint, labels, tokens), and
holds the log-probabilities as float32, which is what engines compute in; softmax is applied after. Entries are never updated and
never deleted: they expire, at times spread so that what was written together is not computed again together, and Redis may evict
them.

Looking up is one MGET within the link's limit. Writing happens in the background, many requests' results in one script call, from a
queue that drops what it has no room for.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

from redis.asyncio import RedisCluster

from gateway.cache.base import Logprobs
from gateway.redis.connect import read_values
from gateway.redis.link import Link, RedisAway
from gateway.redis.scripts import Script
from gateway.telemetry import Telemetry

QUEUE_ENTRIES = 20_000
"""Results waiting to be written, some 5 MB."""
BATCH_ENTRIES = 500
"""Of one write; Redis is busy with it for about a millisecond."""
GATHER_SECONDS = 0.005
"""A write waits this long for company, which costs nobody anything and saves most of its CPU time."""
WRITE_SECONDS = 1.0
JITTER = 0.1
"""An entry's time to live is spread by this fraction to both sides."""

_STORE = Script(
    """
    for i = 1, #KEYS do
        redis.call('SET', KEYS[i], ARGV[2 * i - 1], 'PX', ARGV[2 * i])
    end
    """
)


class RedisCache:
    """Between :meth:`start` and :meth:`stop` results are written; they are read whenever the link is closed."""

    def __init__(self, link: Link, telemetry: Telemetry, *, prefix: str, ttl_seconds: float) -> None:
        self._link = link
        self._telemetry = telemetry
        self._prefix = f"{prefix}:score:".encode()
        self._ttl_ms = ttl_seconds * 1000
        self._queue: deque[tuple[bytes, Logprobs]] = deque()
        self._filled = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write what :meth:`put_many` is given."""
        self._writer = asyncio.create_task(self._keep_writing())

    async def stop(self) -> None:
        """Write what is there, and no more."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        while self._queue:
            await self._write()

    async def get_many(self, keys: Sequence[bytes]) -> list[Logprobs | None]:
        """One MGET."""
        if not keys:
            return []
        names = [self._prefix + key for key in keys]
        try:
            values = await self._link.ask(lambda: read_values(self._link.client, names))
        except RedisAway:
            return [None] * len(keys)
        return [None if value is None else _unpacked(value) for value in values]

    async def put_many(self, results: Mapping[bytes, Logprobs]) -> None:
        """Queue ``results``; nothing is waited for."""
        room = 0 if self._link.is_open else QUEUE_ENTRIES - len(self._queue)
        self._queue.extend(list(results.items())[:room])
        if room < len(results):
            self._telemetry.cache_written("dropped", len(results) - room)
        self._filled.set()

    async def _keep_writing(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(GATHER_SECONDS)
            while self._queue:
                await self._write()
            self._filled.clear()

    async def _write(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH_ENTRIES, len(self._queue)))]
        entries = [(self._prefix + key, _packed(logprobs), self._ttl()) for key, logprobs in batch]
        try:
            await self._link.ask(lambda: self._store(entries), seconds=WRITE_SECONDS)
        except RedisAway:
            self._telemetry.cache_written("dropped", len(entries))
        else:
            self._telemetry.cache_written("stored", len(entries))

    async def _store(self, entries: list[tuple[bytes, bytes, int]]) -> None:
        """One script call costs a fifth of the CPU time of as many SETs here; its keys must share a node, so a cluster gets
        SETs."""
        client = self._link.client
        if isinstance(client, RedisCluster):
            pipeline = client.pipeline()
            for name, value, ttl in entries:
                pipeline.execute_command("SET", name, value, "PX", ttl)
            await pipeline.execute()
        else:
            arguments = [part for _, value, ttl in entries for part in (value, ttl)]
            await _STORE(client, [name for name, _, _ in entries], arguments)

    def _ttl(self) -> int:
        """Milliseconds."""
        return max(1, int(self._ttl_ms * random.uniform(1 - JITTER, 1 + JITTER)))


def _packed(logprobs: Logprobs) -> bytes:
    """In the machine's byte order, as the tokens in the key are."""
    return array("f", logprobs).tobytes()


def _unpacked(value: bytes) -> Logprobs | None:
    """None for what was not written here."""
    return tuple(array("f", value)) if value and len(value) % 4 == 0 else None
