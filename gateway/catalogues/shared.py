"""Catalogues in Redis, shared by all gateways.

All names begin with ``PREFIX:{catalogues}:``, whose hash tag keeps them in one slot of a cluster, so that scripts change them
atomically:

======================  ============================================================================================
``of:OWNER``            hash: epoch of each catalogue, by name
``at:OWNER:EPOCH:meta`` hash: spec, version, stamp, floor, items, bytes, tokens, warmed, warm_up
``at:OWNER:EPOCH:items`` hash: record of each item, by id
``at:OWNER:EPOCH:log``  sorted set of ids, scored by the version of their last change
``at:OWNER:EPOCH:gone`` sorted set of the ids that were removed last, scored by the version of the removal
``at:OWNER:EPOCH:ends`` sorted set of ids that expire, scored by expiry time in milliseconds
``at:OWNER:EPOCH:stamps`` list: version and stamp of the last calls that changed items
``sizes``               hash: bytes of each owner's catalogues
``totals``              hash: catalogues, items and bytes of all owners
======================  ============================================================================================

Gateways keep local copies of records (``copies.py``). Log and removed ids tell them which copies an update has made invalid. The
floor is the version of the last removal that is not kept; copies of versions below it are all invalid.

A version alone does not tell two histories apart: when a replica that lags takes over, or the end of the append-only file is lost,
Redis has an earlier version of a catalogue, and later changes reach the same numbers again. So each call that changes items signs
the version that it reaches with a random stamp. A copy is of use only if Redis has its version with its stamp, now or in the past.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.catalogues.copies import Copies, Copy, Mark
from gateway.catalogues.record import tokens_of, with_expiry
from gateway.catalogues.scripts import CHECK, CREATE, DELETE, PAGE, PUT, READ, REMOVE, STATE, WARM_UP
from gateway.catalogues.store import (
    CATALOGUE_BYTES,
    ITEM_BYTES,
    PAGE_ITEMS,
    PURGED_AT_ONCE,
    Found,
    Full,
    Missing,
    Page,
    Spec,
    State,
    Unavailable,
    WarmUp,
    Written,
    check_size,
    lives,
)
from gateway.ops.metrics import Telemetry
from gateway.redis.link import Link, RedisAway, RedisFull
from gateway.settings import CatalogueBounds

SECONDS = 1.0
"""Longest wait for Redis. A request for items fails without it, so this is longer than for a cached result."""
LATER_PAGE_SECONDS = 30.0
"""Longest wait for Redis between two pages of a whole catalogue: the results of the first ones would be lost."""
PAUSE_SECONDS = 0.05
"""Pause between two looks at a circuit breaker that is open. It often opens for a moment only, after one slow command."""
WRITTEN_AT_ONCE = 200
"""Items of one call of a script, which takes Redis about a millisecond."""
READ_AT_ONCE = 500
READ_BYTES = 2 << 20
"""Most items of one call that reads them, and bytes after which it reads no more."""
MOST_CHECKS = 3
"""Looks at a catalogue's version while other requests move the copies on; after as many, a request reads without copies."""

STAMP_BYTES = 6
"""Random bytes of a stamp."""

T = TypeVar("T")

_spec_decoder = msgspec.msgpack.Decoder(Spec)
_warm_up_decoder = msgspec.msgpack.Decoder(WarmUp)


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
        epoch, spec, version, items, size, tokens, warmed, warm_up = await self._call(
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
            warm_up=None if warm_up is None else _warm_up_decoder.decode(warm_up),
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
            try:
                full, stored, more, other, version = map(int, await self._call(PUT, owner, name, epoch, *common, *given))
            except Full as error:
                error.stored = begin
                raise
            self._check_room(full, begin + stored)
            added, changed = added + more, changed + other
        return Written(added, changed, len(items) - added - changed, version)

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> Found:
        """See :class:`CatalogueStore`."""
        copy = await self._current(owner, name)
        if copy.spec is None:
            meta = self._name(owner, copy.epoch, "meta")
            packed = await self._ask(lambda: self._link.client.execute_command("HGET", meta, "spec"))
            if packed is None:
                raise Missing
            copy.spec = _spec_decoder.decode(packed)
        now = self._now()
        records = self._copies.get(copy, ids, now)
        missing = [id for id, record in zip(ids, records, strict=True) if record is None]
        self._telemetry.catalogues.items_found(len(ids) - len(missing), len(missing))
        if missing:
            read = await self._read(owner, copy, list(dict.fromkeys(missing)), now)
            records = [record or read.get(id) for id, record in zip(ids, records, strict=True)]
        check_size(records)
        return Found(copy.spec, copy.epoch, copy.mark.version, records)

    async def pages(self, owner: str, name: str, epoch: str) -> AsyncIterator[list[tuple[str, bytes]]]:
        """See :class:`CatalogueStore`."""
        after: int | None = 0
        while after is not None:
            page = await self._page_again(owner, name, after, epoch)
            if page.items:
                yield page.items
            after = page.next

    async def _page_again(self, owner: str, name: str, after: int, epoch: str) -> Page:
        """Return a page of :meth:`pages`. A later one than the first is asked for again while Redis is away."""
        until = time.monotonic() + (LATER_PAGE_SECONDS if after else 0)
        while True:
            try:
                return await self.page(owner, name, after, PAGE_ITEMS, epoch=epoch)
            except Unavailable:  # after a pause, see :meth:`_ask`
                if time.monotonic() >= until:
                    raise

    async def page(self, owner: str, name: str, after: int, count: int, *, epoch: str = "") -> Page:
        """See :class:`CatalogueStore`. ``epoch``: that the catalogue must have, if not empty."""
        while True:
            ids, versions, records = await self._call(PAGE, owner, name, epoch, READ_BYTES, after, count)
            if records:
                after = int(versions[len(records) - 1])
            now = self._now()
            found = [(id.decode(), each) for id, each in zip(ids, records, strict=False) if each and lives(each, now)]
            if len(records) == len(ids) < count:
                return Page(found, None)
            if found:
                return Page(found, after)

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

    async def note_warm_up(self, owner: str, name: str, epoch: str, warm_up: WarmUp, warmed: int | None = None) -> None:
        """See :class:`CatalogueStore`."""
        await self._call(WARM_UP, owner, name, epoch, msgspec.msgpack.encode(warm_up), "" if warmed is None else warmed)

    async def _current(self, owner: str, name: str) -> Copy:
        """Return copies that are valid as of now."""
        epoch, mark = "", Mark(-1, "")
        for _ in range(MOST_CHECKS):
            known = self._copies.known(owner, name)
            asked = Mark(-1, "") if known is None else known.mark
            answer = await self._call(CHECK, owner, name, "" if known is None else known.epoch, *asked)
            epoch, mark = answer[0].decode(), Mark(int(answer[1]), answer[2].decode())
            changed = None if answer[3] is None else [id.decode() for id in answer[3]]
            self._telemetry.catalogues.totals(*map(int, answer[4:7]))
            copy = self._copies.follow(owner, name, asked, epoch, mark, changed)
            if copy is not None:
                return copy
        return Copy(epoch, mark, dropped=True)

    async def _read(self, owner: str, copy: Copy, ids: list[str], now: int) -> dict[str, bytes]:
        """Return the live records of ``ids``, and keep copies of them."""
        read: dict[str, bytes] = {}
        begin = 0
        while begin < len(ids):
            few, mark = ids[begin : begin + READ_AT_ONCE], copy.mark
            same, records = await self._call(READ, owner, "", copy.epoch, READ_BYTES, *mark, *few)
            begin += len(records)
            found = {id: record for id, record in zip(few, records, strict=False) if record is not None and lives(record, now)}
            if same:
                self._copies.keep(copy, mark, found)
            read |= found
            check_size(read.values())
        return read

    async def _call(self, script: Any, owner: str, name: str, *arguments: Any) -> Any:
        """Run a script. Raises :class:`Missing`, :class:`Unavailable`, and :class:`Full` if Redis has no memory for what it would
        write."""
        keys = [f"{self._prefix}{each}" for each in (f"of:{owner}", "sizes", "totals")]
        given = [self._prefix, owner, name, secrets.token_urlsafe(STAMP_BYTES), *arguments]
        answer = await self._ask(lambda: script(self._link.client, keys, given))
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
        except RedisFull:
            raise Full(None) from None
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
