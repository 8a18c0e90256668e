"""The shared cache: results in Redis, under keys that cover all inputs of the result.

The name of an entry is ``PREFIX:score:`` and the 16 bytes of its key (``gateway/scoring/keys.py``: engine fingerprint, readout,
tokens). The value holds the row as float32, the precision of the engines; softmax is applied after the lookup. Entries
are never updated or deleted. They expire, with jitter so that entries written together do not expire together, and Redis may evict
them.

A lookup is one MGET within the link's time limit. Writes happen in the background: one script call stores the results of many
requests, from a queue that drops results when it is full.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain

from redis.asyncio import RedisCluster

from gateway.cache.base import Row
from gateway.ops.metrics import Telemetry
from gateway.redis.connect import read_values
from gateway.redis.link import Link, RedisAway
from gateway.redis.scripts import Script

QUEUE_ENTRIES = 20_000
QUEUE_NUMBERS = 1 << 20
"""Most results, and most numbers of their rows, waiting to be written: about 40 MB."""
BATCH_ENTRIES = 500
BATCH_NUMBERS = 1 << 15
"""Most results of one write, and about the most numbers of their rows; Redis needs about a millisecond for it."""
GATHER_SECONDS = 0.005
"""Delay of a write that gathers further results. No request waits for a write, and one large write needs less CPU time."""
WRITE_SECONDS = 1.0
JITTER = 0.1
"""Largest relative change of an entry's time to live, in both directions."""

# KEYS: names of entries. ARGV: their values, of equal length and joined, which costs the gateway less than an argument for each;
# the time to live in milliseconds; its jitter.
_STORE = Script(
    """
    local size = #ARGV[1] / #KEYS
    for i = 1, #KEYS do
        local spread = 1 + ARGV[3] * (string.byte(KEYS[i], -1) / 127.5 - 1)
        local value = string.sub(ARGV[1], (i - 1) * size + 1, i * size)
        redis.call('SET', KEYS[i], value, 'PX', math.max(1, math.floor(ARGV[2] * spread)))
    end
    """
)


class RedisCache:
    """Writes results between :meth:`start` and :meth:`stop`; reads them while the link is closed, that is, Redis is available."""

    def __init__(self, link: Link, telemetry: Telemetry, *, prefix: str, ttl_seconds: float) -> None:
        self._link = link
        self._telemetry = telemetry
        self._prefix = f"{prefix}:score:".encode()
        self._ttl_ms = ttl_seconds * 1000
        self._queue: deque[tuple[bytes, Row]] = deque()
        self._queued_numbers = 0
        self._filled = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start writing queued results."""
        self._writer = asyncio.create_task(self._keep_writing())

    async def stop(self) -> None:
        """Stop the background task and write the queued results."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        while self._queue:
            await self._write()

    async def get_many(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Look up ``keys`` with :func:`read_values`. While Redis is away, every key is missing."""
        if not keys:
            return []
        names = [self._prefix + key for key in keys]
        try:
            values = await self._link.ask(lambda: read_values(self._link.client, names))
        except RedisAway:
            return [None] * len(keys)
        return [None if value is None else _unpacked(value) for value in values]

    async def put_many(self, results: Mapping[bytes, Row]) -> None:
        """Queue ``results`` and return at once. Results beyond the queue's room, or while Redis is away, are dropped."""
        room = 0 if self._link.is_open else QUEUE_ENTRIES - len(self._queue)
        if len(results) <= room and self._queued_numbers + (numbers := sum(map(len, results.values()))) <= QUEUE_NUMBERS:
            self._queue.extend(results.items())
            self._queued_numbers += numbers
        else:
            self._put_some(results, room)
        self._filled.set()

    def _put_some(self, results: Mapping[bytes, Row], room: int) -> None:
        """Queue those of ``results`` that have room. ``room``: most of them."""
        dropped = 0
        for entry in results.items():
            numbers = len(entry[1])
            if room <= 0 or self._queued_numbers + numbers > QUEUE_NUMBERS:
                dropped += 1
            else:
                self._queue.append(entry)
                self._queued_numbers += numbers
                room -= 1
        self._telemetry.cache_writes.labels("dropped").inc(dropped)

    async def _keep_writing(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(GATHER_SECONDS)
            while self._queue:
                await self._write()
            self._filled.clear()

    async def _write(self) -> None:
        """Write the first results of the queue whose rows have the same length."""
        batch: list[tuple[bytes, Row]] = []
        length = len(self._queue[0][1])
        most = min(BATCH_ENTRIES, 1 + BATCH_NUMBERS // max(1, length))
        while self._queue and len(batch) < most and len(self._queue[0][1]) == length:
            batch.append(self._queue.popleft())
        self._queued_numbers -= length * len(batch)
        names = [self._prefix + key for key, _ in batch]
        # float32 in the machine's byte order, which the tokens in the key have too
        values = array("f", chain.from_iterable([row for _, row in batch])).tobytes()
        try:
            await self._link.ask(lambda: self._store(names, values), seconds=WRITE_SECONDS)
        except RedisAway:
            self._telemetry.cache_writes.labels("dropped").inc(len(names))
        else:
            self._telemetry.cache_writes.labels("stored").inc(len(names))

    async def _store(self, names: list[bytes], values: bytes) -> None:
        """Store entries. One script call takes a fifth of the gateway's CPU time of separate SETs. The keys of a script must be
        on one node, so a cluster gets SETs."""
        client = self._link.client
        if not isinstance(client, RedisCluster):
            await _STORE(client, names, [values, self._ttl_ms, JITTER])
            return
        pipeline, size = client.pipeline(), len(values) // len(names)
        for place, name in enumerate(names):
            pipeline.execute_command("SET", name, values[place * size : (place + 1) * size], "PX", self._ttl())
        await pipeline.execute()

    def _ttl(self) -> int:
        """Time to live in milliseconds, with jitter."""
        return max(1, int(self._ttl_ms * random.uniform(1 - JITTER, 1 + JITTER)))


def _unpacked(value: bytes) -> Row | None:
    """Decode a value; None if its length is not valid."""
    return tuple(array("f", value)) if value and len(value) % 4 == 0 else None
