"""Catalogues in Redis, shared by all gateways.

All names begin with ``PREFIX:{catalogues}:``, whose hash tag keeps them in one slot of a cluster, so that scripts change them
atomically:

======================  ============================================================================================
``of:OWNER``            hash: epoch of each catalogue, by name
``at:OWNER:EPOCH:meta`` hash: spec, version, floor, items, bytes, tokens, warmed
``at:OWNER:EPOCH:items`` hash: record of each item, by id
``at:OWNER:EPOCH:log``  sorted set of ids, scored by the version of their last change
``at:OWNER:EPOCH:ends`` sorted set of ids that expire, scored by expiry time in milliseconds
``sizes``               hash: bytes of each owner's catalogues
``totals``              hash: catalogues, items and bytes of all owners
======================  ============================================================================================

Gateways keep local copies of records (``copies.py``). The log tells them which copies an update has made invalid. A removal leaves
no entry in the log; it raises the floor, and copies of versions below the floor are all invalid.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.catalogues.copies import Copies
from gateway.catalogues.record import tokens_of, with_expiry
from gateway.catalogues.scripts import CHECK, CREATE, DELETE, PAGE, PUT, READ, REMOVE, STATE
from gateway.catalogues.store import (
    CATALOGUE_BYTES,
    ITEM_BYTES,
    PAGE_ITEMS,
    PURGED_AT_ONCE,
    Found,
    Full,
    Missing,
    Spec,
    State,
    Unavailable,
    Written,
    check_size,
    lives,
)
from gateway.configuration.bounds import CatalogueBounds
from gateway.metrics.telemetry import Telemetry
from gateway.redis.link import Link, RedisAway

SECONDS = 1.0
"""Longest wait for Redis. A request for items fails without it, so this is longer than for a cached result."""
PAUSE_SECONDS = 0.05
"""Pause between two looks at a circuit breaker that is open. It often opens for a moment only, after one slow command."""
WRITTEN_AT_ONCE = 200
"""Items of one call of a script, which takes Redis about a millisecond."""
READ_AT_ONCE = 500
READ_BYTES = 2 << 20
"""Most items of one call that reads them, and bytes after which it reads no more."""
MOST_CHANGES = 1000
"""Changes for which a gateway asks; after more, it drops all its copies of the catalogue."""

T = TypeVar("T")

_spec_decoder = msgspec.msgpack.Decoder(Spec)


class RedisCatalogues:
    """Catalogues in Redis, with local copies of items. While Redis is away, no catalogue can be read: a copy may be out of date."""

    def __init__(
        self,
        link: Link,
        bounds: CatalogueBounds,
        copies: Copies,
        telemetry: Telemetry,
        *,
        prefix: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._bounds = bounds
        self._copies = copies
        self._telemetry = telemetry
        self._prefix = f"{prefix}:{{catalogues}}:"
        self._clock = clock

    async def create(self, owner: str, name: str, spec: Spec) -> State:
        """See :class:`CatalogueStore`."""
        packed, epoch = msgspec.msgpack.encode(spec), secrets.token_hex(8)
        answer = await self._call(CREATE, owner, name, epoch, packed, CATALOGUE_BYTES, *self._bounds)
        self._check_room(int(answer[0]), 0)
        return await self.state(owner, name)

    async def state(self, owner: str, name: str) -> State:
        """See :class:`CatalogueStore`."""
        epoch, spec, version, items, size, tokens, warmed = await self._call(
            STATE, owner, name, self._now(), PURGED_AT_ONCE, ITEM_BYTES
        )
        return State(
            name=name,
            spec=_spec_decoder.decode(spec),
            epoch=epoch.decode(),
            version=int(version),
            items=int(items),
            bytes=int(size),
            tokens=int(tokens),
            warmed=None if warmed is None else int(warmed),
        )

    async def names(self, owner: str) -> list[str]:
        """See :class:`CatalogueStore`."""
        names = await self._ask(lambda: self._link.client.execute_command("HKEYS", f"{self._prefix}of:{owner}"))
        return sorted(name.decode() for name in names)

    async def put(self, owner: str, name: str, epoch: str, items: Sequence[tuple[str, bytes]], expires: int) -> Written:
        """See :class:`CatalogueStore`."""
        added = changed = version = 0
        for begin in range(0, len(items), WRITTEN_AT_ONCE):
            few = items[begin : begin + WRITTEN_AT_ONCE]
            given = [part for id, record in few for part in (id, with_expiry(record, expires), tokens_of(record))]
            common = (self._now(), PURGED_AT_ONCE, ITEM_BYTES, expires, *self._bounds)
            full, stored, more, other, version = map(int, await self._call(PUT, owner, name, epoch, *common, *given))
            self._check_room(full, begin + stored)
            added, changed = added + more, changed + other
        return Written(added, changed, len(items) - added - changed, version)

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> Found:
        """See :class:`CatalogueStore`."""
        known = self._copies.known(owner, name)
        epoch, version = ("", -1) if known is None else (known.epoch, known.version)
        answer = await self._call(CHECK, owner, name, epoch, version, MOST_CHANGES)
        epoch, version = answer[0].decode(), int(answer[1])
        copy = self._copies.follow(owner, name, epoch, version, None if answer[2] is None else [id.decode() for id in answer[2]])
        if copy.spec is None:
            packed = await self._ask(lambda: self._link.client.execute_command("HGET", self._name(owner, epoch, "meta"), "spec"))
            if packed is None:
                raise Missing
            copy.spec = _spec_decoder.decode(packed)
        self._telemetry.catalogues.totals(*map(int, answer[3:6]))
        now = self._now()
        records = self._copies.get(copy, ids, now)
        missing = [id for id, record in zip(ids, records, strict=True) if record is None]
        self._telemetry.catalogues.items_found(len(ids) - len(missing), len(missing))
        if missing:
            read = await self._read(owner, epoch, copy, list(dict.fromkeys(missing)), now)
            records = [record or read.get(id) for id, record in zip(ids, records, strict=True)]
        check_size(records)
        return Found(copy.spec, epoch, version, records)

    async def pages(self, owner: str, name: str, epoch: str) -> AsyncIterator[list[tuple[str, bytes]]]:
        """See :class:`CatalogueStore`."""
        after = 0
        while page := await self.page(owner, name, after, PAGE_ITEMS, epoch=epoch):
            yield [(id, record) for id, _, record in page]
            after = page[-1][1]

    async def page(self, owner: str, name: str, after: int, count: int, *, epoch: str = "") -> list[tuple[str, int, bytes]]:
        """See :class:`CatalogueStore`. ``epoch``: that the catalogue must have, if not empty."""
        found: list[tuple[str, int, bytes]] = []
        while not found:
            ids, versions, records = await self._call(PAGE, owner, name, epoch, READ_BYTES, after, count)
            if not ids:
                return []
            after, now = int(versions[len(records) - 1]), self._now()
            read = zip(ids, versions, records, strict=False)
            found = [(id.decode(), int(version), record) for id, version, record in read if record and lives(record, now)]
        return found

    async def remove(self, owner: str, name: str, ids: Sequence[str]) -> int:
        """See :class:`CatalogueStore`."""
        removed = 0
        for begin in range(0, len(ids), WRITTEN_AT_ONCE):
            few = ids[begin : begin + WRITTEN_AT_ONCE]
            removed += int(await self._call(REMOVE, owner, name, self._now(), PURGED_AT_ONCE, ITEM_BYTES, *few))
        return removed

    async def delete(self, owner: str, name: str) -> None:
        """See :class:`CatalogueStore`."""
        await self._call(DELETE, owner, name)
        self._copies.forget(owner, name)

    async def warmed(self, owner: str, name: str, epoch: str, version: int) -> None:
        """See :class:`CatalogueStore`."""
        meta = self._name(owner, epoch, "meta")
        await self.state(owner, name)
        await self._ask(lambda: self._link.client.execute_command("HSET", meta, "warmed", version))

    async def _read(self, owner: str, epoch: str, copy: Any, ids: list[str], now: int) -> dict[str, bytes]:
        """Return the live records of ``ids``, and keep copies of them."""
        read: dict[str, bytes] = {}
        begin = 0
        while begin < len(ids):
            few = ids[begin : begin + READ_AT_ONCE]
            version, records = await self._call(READ, owner, "", epoch, READ_BYTES, *few)
            begin += len(records)
            found = {id: record for id, record in zip(few, records, strict=False) if record is not None and lives(record, now)}
            self._copies.keep(copy, int(version), found)
            read |= found
            check_size(read.values())
        return read

    async def _call(self, script: Any, owner: str, name: str, *arguments: Any) -> Any:
        """Run a script. Raises :class:`Missing`, :class:`Unavailable`."""
        keys = [f"{self._prefix}{each}" for each in (f"of:{owner}", "sizes", "totals")]
        answer = await self._ask(lambda: script(self._link.client, keys, [self._prefix, owner, name, *arguments]))
        if answer is None:
            raise Missing
        return answer

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(int(SECONDS / PAUSE_SECONDS)):
            if not self._link.is_open:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        try:
            return await self._link.ask(command, seconds=SECONDS)
        except RedisAway:
            raise Unavailable from None

    def _check_room(self, full: int, stored: int) -> None:
        """Raise :class:`Full` if a script found no room: 1 in the group's share, 2 in all."""
        if full:
            raise Full(self._bounds.group_bytes if full == 1 else self._bounds.bytes, group=full == 1, stored=stored)

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _name(self, owner: str, epoch: str, what: str) -> str:
        return f"{self._prefix}at:{owner}:{epoch}:{what}"
