"""Both stores of catalogues: bounds, expiry, versions, and copies that updates make invalid."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.catalogues.copies import Copies
from gateway.catalogues.record import packed
from gateway.catalogues.scripts import MOST_CHANGES, REMOVED_BYTES
from gateway.catalogues.shared import RedisCatalogues
from gateway.catalogues.store import CATALOGUE_BYTES, ITEM_BYTES, CatalogueStore, Full, Missing, TooLarge, Unavailable
from gateway.ops.metrics import Telemetry
from gateway.redis.link import Link
from gateway.settings import CatalogueBounds
from tests.gateway.catalogues.conftest import KINDS, SPEC, WIDE, first, items, store
from tests.gateway.conftest import closed
from tests.redis import RedisServer


@pytest.mark.parametrize("kind", KINDS)
async def test_an_update_is_seen_at_once_by_every_gateway(request: pytest.FixtureRequest, kind: str) -> None:
    async with store(request, kind, gateways=3) as (_, gateways):
        one, two, three = gateways
        epoch = (await one.create("o", "c", SPEC)).epoch
        written = await one.put("o", "c", epoch, items(*range(10)), 0)
        assert (written.added, written.changed, written.unchanged) == (10, 0, 0)
        for each in gateways:
            assert await first(each, ["i3", "i9", "x"]) == [3, 9, None]
        await two.put("o", "c", epoch, [("i3", items(33)[0][1]), ("x", items(77)[0][1])], 0)
        for each in gateways:
            assert await first(each, ["i3", "i9", "x"]) == [33, 9, 77]
        before = (await one.state("o", "c")).version
        written = await three.put("o", "c", epoch, items(*range(4, 8)), 0)
        assert (written.unchanged, written.version) == (4, before), "equal content is no change"
        assert await two.remove("o", "c", ["i3", "i3", "nobody"]) == 1
        for each in gateways:
            assert await first(each, ["i3", "i9"]) == [None, 9]
        await three.delete("o", "c")
        for each in gateways:
            with pytest.raises(Missing):
                await each.find("o", "c", ["i9"])
        with pytest.raises(Missing):
            await one.put("o", "c", epoch, items(1), 0)
        await one.create("o", "c", SPEC)
        for each in gateways:
            assert await first(each, ["i9"]) == [None]
        assert await one.names("o") == ["c"]
        assert await one.names("other") == []


@pytest.mark.parametrize("kind", KINDS)
async def test_items_expire(request: pytest.FixtureRequest, kind: str) -> None:
    async with store(request, kind, gateways=2) as (now, (one, two)):
        epoch = (await one.create("o", "c", msgspec.structs.replace(SPEC, ttl_seconds=10.0))).epoch
        ends = int(now() * 1000) + 10_000
        await one.put("o", "c", epoch, items(1, 2, 3), ends)
        assert await first(two, ["i1", "i2"]) == [1, 2]
        now.seconds += 5
        await one.put("o", "c", epoch, items(2, 4), ends + 5000)
        now.seconds += 6
        for each in (one, two):
            assert await first(each, ["i1", "i2", "i3", "i4"]) == [None, 2, None, 4]
        assert [id for id, _ in (await one.page("o", "c", 0, 100)).items] == ["i2", "i4"]
        assert [id async for page in two.pages("o", "c", epoch) for id, _ in page] == ["i2", "i4"]
        state = await two.state("o", "c")
        assert (state.items, state.tokens) == (2, 8)
        now.seconds += 10
        state = await one.state("o", "c")
        assert state.items == 0
        assert CATALOGUE_BYTES <= state.bytes <= CATALOGUE_BYTES + 4 * (REMOVED_BYTES + 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_items_that_have_expired_make_room_for_as_many(request: pytest.FixtureRequest, kind: str) -> None:
    size = ITEM_BYTES + 5 + len(items(1)[0][1])
    room = CATALOGUE_BYTES + 1500 * size + (MOST_CHANGES * (REMOVED_BYTES + 5) if kind == "redis" else 0)
    async with store(request, kind, CatalogueBounds(room, room)) as (now, (one,)):
        epoch = (await one.create("o", "c", msgspec.structs.replace(SPEC, ttl_seconds=10.0))).epoch
        await one.put("o", "c", epoch, items(*range(1000, 2500)), int(now() * 1000) + 10_000)
        now.seconds += 11
        assert (await one.put("o", "c", epoch, items(*range(3000, 4500)), int(now() * 1000) + 10_000)).added == 1500
        assert (await one.state("o", "c")).items == 1500


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_store_refuses_and_keeps_what_it_has(request: pytest.FixtureRequest, kind: str) -> None:
    size = ITEM_BYTES + 2 + len(items(1)[0][1])
    bounds = CatalogueBounds(CATALOGUE_BYTES + 5 * size, 2 * CATALOGUE_BYTES + 8 * size)
    async with store(request, kind, bounds) as (_, (one,)):
        epoch = (await one.create("a", "c", SPEC)).epoch
        with pytest.raises(Full) as full:
            await one.put("a", "c", epoch, items(*range(9)), 0)
        assert (full.value.group, full.value.stored, full.value.most) == (True, 5, bounds.group_bytes)
        assert await first(one, ["i4", "i5"], "a") == [4, None]
        await one.put("a", "c", epoch, [("i0", items(50)[0][1])], 0)  # of the same size
        with pytest.raises(Full):
            await one.put("a", "c", epoch, [("i0", items(50, size=50)[0][1])], 0)
        with pytest.raises(Full):
            await one.create("a", "d", SPEC)
        other = (await one.create("b", "c", SPEC)).epoch
        with pytest.raises(Full) as full:
            await one.put("b", "c", other, items(*range(5)), 0)
        assert (full.value.group, full.value.stored) == (False, 3)
        await one.remove("a", "c", ["i0", "i1", "i2", "i3"])
        await one.put("a", "c", epoch, [("e", packed([], ""))], 0)
        assert await one.remove("a", "c", ["e"]) == 1, "an item without tokens"
        await one.put("b", "c", other, items(3, 4), 0)
        await one.delete("a", "c")
        await one.delete("b", "c")
        epoch = (await one.create("a", "c", SPEC)).epoch
        assert (await one.put("a", "c", epoch, items(*range(5)), 0)).added == 5, "all room is back"


@pytest.mark.parametrize("kind", KINDS)
async def test_pages_have_every_item_that_stays(request: pytest.FixtureRequest, kind: str) -> None:
    async with store(request, kind) as (_, (one,)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(*range(1300)), 0)
        seen: dict[str, bytes] = {}
        async for page in one.pages("o", "c", epoch):
            seen |= dict(page)
            if len(seen) < 600:
                await one.put("o", "c", epoch, items(*range(100, 120), tail="changed"), 0)
                await one.remove("o", "c", ["i1000", "i5"])
        assert set(seen) >= {f"i{number}" for number in range(1300)} - {"i1000", "i5"}
        assert "i1000" not in seen


async def test_copies_never_serve_an_old_item(request: pytest.FixtureRequest) -> None:
    """Gateways read while others write. What a read returns is not older than the last write that was confirmed before the read."""
    async with store(request, "redis", gateways=3, copies=20_000) as (_, gateways):
        epoch = (await gateways[0].create("o", "c", SPEC)).epoch
        ids = [f"i{number}" for number in range(40)]
        confirmed = dict.fromkeys(ids, 0)
        await gateways[0].put("o", "c", epoch, [(id, packed([0], "")) for id in ids], 0)
        dice = random.Random(7)
        ended = asyncio.Event()

        async def write() -> None:
            for value in range(1, 400):
                id = dice.choice(ids)
                if value % 50 == 0:
                    await gateways[0].remove("o", "c", [id])
                await gateways[value % 2].put("o", "c", epoch, [(id, packed([value], ""))], 0)
                confirmed[id] = value
            ended.set()

        async def read(gateway: CatalogueStore) -> int:
            reads = 0
            while not ended.is_set():
                asked = dice.sample(ids, 10)
                least = [confirmed[id] for id in asked]
                for value, known in zip(await first(gateway, asked), least, strict=True):
                    assert value is None or value >= known
                reads += 1
            return reads

        _, *reads = await asyncio.gather(write(), *(read(gateway) for gateway in gateways for _ in range(3)))
        assert min(reads) > 20
        for gateway in gateways:
            assert await first(gateway, ids) == [confirmed[id] for id in ids]


async def test_a_hot_request_reads_no_items(request: pytest.FixtureRequest, redis: RedisServer) -> None:
    async with store(request, "redis") as (_, (one,)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(*range(100)), 0)
        ids = [f"i{number}" for number in range(100)]
        await one.find("o", "c", ids)

        def calls() -> dict[str, int]:
            with redis.client() as plain:
                stats: Any = plain.info("commandstats")
                return {name: stat["calls"] for name, stat in stats.items()}

        before = calls()
        assert await first(one, ids) == list(range(100))
        after = calls()
        assert after["cmdstat_evalsha"] - before["cmdstat_evalsha"] == 1
        assert after["cmdstat_hmget"] - before["cmdstat_hmget"] == 2, "versions and totals"


async def test_copies_are_bounded(request: pytest.FixtureRequest) -> None:
    copies = 100 * (ITEM_BYTES + 60)
    async with store(request, "redis", copies=copies) as (_, (one,)):
        for name in "cd":
            epoch = (await one.create("o", name, SPEC)).epoch
            await one.put("o", name, epoch, items(*range(300)), 0)
        kept = one._copies  # type: ignore[attr-defined]
        for name in "cdc":
            found = await one.find("o", name, [f"i{number}" for number in range(300)])
            assert None not in found.records
            assert 0.8 * copies < kept.bytes <= copies
        await one.delete("o", "c")
        await one.delete("o", "d")
        assert kept.bytes == 0


async def test_without_redis_nothing_is_read(request: pytest.FixtureRequest) -> None:
    with RedisServer.start() as own:
        link = Link(Redis(port=own.port), Telemetry(), seconds=0.5)
        await closed(link)
        one = RedisCatalogues(link, WIDE, Copies(1 << 20), Telemetry(), prefix="p")
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(1), 0)
        await one.find("o", "c", ["i1"])
        own.kill()
        for _ in range(2):
            with pytest.raises(Unavailable):
                await one.find("o", "c", ["i1"])
        await link.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_reads_a_bounded_number_of_bytes(request: pytest.FixtureRequest, kind: str) -> None:
    async with store(request, kind) as (_, (one,)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        for number in range(0, 40, 10):
            await one.put("o", "c", epoch, items(*range(number, number + 10), size=1 << 18), 0)
        assert await first(one, [f"i{number}" for number in range(30)]) == list(range(30))
        with pytest.raises(TooLarge):
            await one.find("o", "c", [f"i{number}" for number in range(40)])
        assert [id async for page in one.pages("o", "c", epoch) for id, _ in page] == [f"i{number}" for number in range(40)]
