"""The key-value store in memory and in a real Redis: bounds, owners, expiry, pages, and what several gateways see."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from redis.asyncio import Redis

from tests.redis import RedisServer
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.store.base import Full, Missing, Page, Space, Store, Totals, Unavailable
from yardstick_llm.gateway.store.link import Link
from yardstick_llm.gateway.store.memory import CACHED_BYTES, MemoryStore
from yardstick_llm.gateway.store.redis import RedisStore

pytestmark = pytest.mark.parametrize("kind", ["memory", "redis"])
WIDE = 1 << 30
prefixes = (f"p{number}" for number in count())


def space(**bounds: int | float | bool) -> Space:
    """A space whose entries take what their names and values do."""
    given = {"name": "s", "bytes": WIDE, "entries": WIDE, "entry_bytes": 0} | bounds
    return Space(**given)  # type: ignore[arg-type]


@asynccontextmanager
async def stores(kind: str, redis: RedisServer, gateways: int = 1) -> AsyncIterator[list[Store]]:
    """A store, as several gateways see it."""
    if kind == "memory":
        yield [MemoryStore()] * gateways
        return
    prefix = next(prefixes)
    links = [Link(Redis(port=redis.port), Telemetry(), seconds=5) for _ in range(gateways)]
    yield [RedisStore(link, Telemetry(), prefix=prefix, cache_seconds=60) for link in links]
    for link in links:
        await link.stop()


def entries(*numbers: int, size: int = 4) -> list[tuple[str, bytes]]:
    return [(f"i{number}", f"{number}".encode().rjust(size)) for number in numbers]


async def there(store: Store, where: Space, owner: str, numbers: range, box: str = "") -> set[int]:
    values = (await store.get(where, owner, [f"i{number}" for number in numbers], box=box)).values
    return {number for number, value in zip(numbers, values, strict=True) if value is not None}


async def names(store: Store, where: Space, owner: str, box: str, count: int = 100) -> list[str]:
    found, page = list[str](), Page([], 0)
    while page.next is not None:
        page = await store.page(where, owner, page.next, count, box=box)
        found += [name for name, _ in page.entries]
    return found


async def test_a_change_is_seen_at_once_by_every_gateway(kind: str, redis: RedisServer) -> None:
    where = space(box_bytes=100, entry_bytes=10)
    async with stores(kind, redis, 3) as gateways:
        one, two, three = gateways
        await one.create(where, "o", "c", b"head")
        epoch = (await two.describe(where, "o", "c")).epoch
        written = await one.put(where, "o", entries(*range(10)), box="c", epoch=epoch)
        assert (written.added, written.changed) == (10, 0)
        await two.put(where, "o", [("i3", b"new"), ("x", b"more")], box="c", epoch=epoch)
        for each in gateways:
            found = await each.get(where, "o", ["i3", "i9", "nobody", "x"], box="c")
            assert (found.head, found.epoch, found.values) == (b"head", epoch, [b"new", b"   9", None, b"more"])
        before = await one.describe(where, "o", "c")
        assert (before.entries, before.value_bytes, before.bytes) == (11, 43, 100 + 11 * 10 + 21 + 43)
        written = await three.put(where, "o", entries(*range(4, 8)), box="c", epoch=epoch)
        assert (written.added, written.changed, written.version) == (0, 0, before.version), "equal content is no change"
        assert await two.remove(where, "o", ["i3", "i3", "nobody"], box="c") == 1
        after = await one.describe(where, "o", "c")
        assert after.version > before.version
        for each in gateways:
            assert await there(each, where, "o", range(10), "c") == {*range(10)} - {3}
            assert await each.boxes(where, "o") == ["c"]
            assert await each.boxes(where, "other") == []
            with pytest.raises(Missing):
                await each.get(where, "other", ["i9"], box="c")
        await one.create(where, "o", "c", b"another head")
        assert (await one.describe(where, "o", "c")) == after, "it exists"
        assert one.totals("s") == Totals(1, 10, after.bytes)
        await three.delete(where, "o", "c")
        for each in gateways:
            with pytest.raises(Missing):
                await each.get(where, "o", ["i9"], box="c")
        await one.create(where, "o", "c", b"head")
        with pytest.raises(Missing):
            await two.put(where, "o", entries(1), box="c", epoch=epoch)
        assert await there(two, where, "o", range(10), "c") == set(), "a new box has no old entries"
        assert two.totals("s") == Totals(1, 0, 100)


async def test_a_full_store_refuses_and_keeps_what_it_has(kind: str, redis: RedisServer) -> None:
    where = space(bytes=2 * 100 + 8 * 16, owner_bytes=100 + 5 * 16, box_bytes=100, entry_bytes=10)
    async with stores(kind, redis) as (one,):
        await one.create(where, "a", "c", b"")
        with pytest.raises(Full) as full:
            await one.put(where, "a", entries(*range(9)), box="c")
        assert (full.value.owner, full.value.stored, full.value.most) == (True, 5, where.owner_bytes)
        assert await there(one, where, "a", range(9), "c") == {0, 1, 2, 3, 4}
        await one.put(where, "a", [("i0", b"same")], box="c")
        with pytest.raises(Full):
            await one.put(where, "a", [("i0", b"longer")], box="c")
        with pytest.raises(Full):
            await one.create(where, "a", "d", b"")
        await one.create(where, "b", "c", b"")
        with pytest.raises(Full) as full:
            await one.put(where, "b", entries(*range(5)), box="c")
        assert (full.value.owner, full.value.stored) == (False, 3)
        await one.remove(where, "a", ["i0", "i1"], box="c")
        await one.put(where, "b", entries(3, 4), box="c")
        await one.delete(where, "a", "c")
        await one.delete(where, "b", "c")
        await one.create(where, "a", "c", b"")
        assert (await one.put(where, "a", entries(*range(5)), box="c")).added == 5, "all room is back"


async def test_who_stores_much_loses_the_oldest_first(kind: str, redis: RedisServer) -> None:
    """The bound that is reached decides who loses: of entries the owner with most of them, of bytes the owner with most bytes."""
    where = space(bytes=1 << 20, entries=20, evicts=True, seconds=60)
    async with stores(kind, redis) as (one,):
        await one.put(where, "large", entries(*range(5), size=40_000))
        for number in range(10, 60):
            await one.put(where, "tiny", entries(number))
        assert await there(one, where, "large", range(5)) == {0, 1, 2, 3, 4}
        assert await there(one, where, "tiny", range(10, 60)) == {*range(45, 60)}
        for number in range(100, 106):
            await one.put(where, "huge", entries(number, size=200_000))
        assert await there(one, where, "large", range(5)) == {0, 1, 2, 3, 4}
        assert await there(one, where, "huge", range(100, 106)) == {102, 103, 104, 105}
        with pytest.raises(Full):
            await one.put(where, "huge", entries(7, size=1 << 20))
        with pytest.raises(Missing):
            await one.get(where, "nobody", ["i1"])


@pytest.mark.parametrize("seed", range(3))
async def test_bounds_hold_whatever_comes(kind: str, redis: RedisServer, seed: int) -> None:
    """Random writes and removals of three owners, beyond all bounds; what is counted is what is there."""
    where, draw = space(bytes=8000, entries=8, entry_bytes=100, evicts=True, seconds=60), random.Random(seed)
    async with stores(kind, redis) as (one,):
        sizes: dict[tuple[str, str], int] = {}
        for number in range(60):
            owner, (entry,) = draw.choice("abc"), entries(number, size=draw.randrange(3, 3000))
            await one.put(where, owner, [entry])
            sizes[owner, entry[0]] = 100 + len(entry[0]) + len(entry[1])
            if draw.random() < 0.2:
                await one.remove(where, *draw.choice([*sizes])[:1], [draw.choice([*sizes])[1]])
        left = 0
        for owner in "abc":
            values = (await one.get(where, owner, [f"i{number}" for number in range(60)], most_bytes=WIDE)).values
            left += sum(sizes[owner, f"i{number}"] for number, value in enumerate(values) if value is not None)
        totals = one.totals("s")
        assert totals.bytes == left <= 8000
        assert 2 <= totals.entries <= 8


async def test_what_has_expired_leaves_when_others_write(kind: str, redis: RedisServer) -> None:
    where = space(seconds=0.1, entries=3, evicts=True)
    async with stores(kind, redis) as (one,):
        await one.put(where, "a", entries(1, 2, 3))
        await asyncio.sleep(0.15)
        for number in range(4, 7):
            await one.put(where, "b", entries(number))
        assert one.totals("s").entries == 3


async def test_pages_have_every_entry_that_stays(kind: str, redis: RedisServer) -> None:
    where = space()
    async with stores(kind, redis) as (one,):
        await one.create(where, "o", "c", b"")
        epoch = (await one.describe(where, "o", "c")).epoch
        await one.put(where, "o", entries(*range(1300)), box="c")
        seen, page = dict[str, bytes](), Page([], 0)
        while page.next is not None:
            page = await one.page(where, "o", page.next, 500, box="c", epoch=epoch)
            seen |= dict(page.entries)
            if len(seen) < 600:
                await one.put(where, "o", entries(*range(100, 120), size=9), box="c")
                await one.remove(where, "o", ["i1000", "i5"], box="c")
        assert set(seen) == {f"i{number}" for number in range(1300)} - {"i1000"}
        assert seen["i100"] == b"100".rjust(9), "it changed, and came again"
        order = [*range(5), *range(6, 100), *range(120, 1000), *range(1001, 1300), *range(100, 120)]
        assert await names(one, where, "o", "c") == [f"i{number}" for number in order], "in the order of the last change"


async def test_reading_ends_at_a_bound(kind: str, redis: RedisServer) -> None:
    where, size = space(), 1 << 19
    async with stores(kind, redis) as (one,):
        await one.create(where, "o", "c", b"")
        for number in range(12):
            await one.put(where, "o", entries(number, size=size), box="c")
        asked = [f"i{number}" for number in range(12)]
        assert len((await one.get(where, "o", asked, box="c", most_bytes=WIDE)).values) == 12
        assert len((await one.get(where, "o", asked, box="c", most_bytes=5 * size)).values) == 6
        page = await one.page(where, "o", 0, 100, box="c")
        assert (len(page.entries), page.next is None) == (5, False)
        assert await names(one, where, "o", "c") == asked


async def test_without_a_server_nothing_is_read(kind: str, redis: RedisServer) -> None:
    if kind == "memory":
        return
    link = Link(Redis(port=1), Telemetry(), seconds=0.5)
    store = RedisStore(link, Telemetry(), prefix="p", cache_seconds=60)
    for call in (store.check(), store.get(space(), "o", ["i1"]), store.put(space(), "o", entries(1)), store.boxes(space(), "o")):
        with pytest.raises(Unavailable):
            await call
    await store.cache({bytes(16): b"value"})
    assert await store.cached([bytes(16)]) == [None]
    await link.stop()


@pytest.mark.slow
async def test_cached_values_are_bounded(kind: str) -> None:
    if kind == "redis":  # its own bound: see test_cached_results.py
        return
    keys = [place.to_bytes(16, "big") for place in range(100)]
    few = MemoryStore(3, 1 << 20)
    await few.cache(dict.fromkeys(keys[:3], b"value"))
    await few.cached(keys[:1])
    await few.cache({keys[3]: b"value"})
    assert await few.cached(keys[:4]) == [b"value", None, b"value", b"value"], "the least recently used one goes first"
    small = MemoryStore(10**6, 10 * (CACHED_BYTES + 20))
    await small.cache(dict.fromkeys(keys, bytes(20)))
    assert (await small.cached(keys)).count(None) == 90
    for none in (MemoryStore(0, 1 << 20), MemoryStore(100, 0)):
        await none.cache({keys[0]: b"value"})
        assert await none.cached(keys[:1]) == [None]
    honest = MemoryStore(10**6, 1 << 30)
    tracemalloc.start()
    try:
        for place in range(20_000):
            await honest.cache({place.to_bytes(16, "big"): place.to_bytes(16, "little")})
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.6 * honest.cached_bytes < used < 1.2 * honest.cached_bytes, "the bound is about what the interpreter allocates"
