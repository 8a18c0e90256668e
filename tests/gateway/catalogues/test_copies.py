"""Copies of items in Redis: after Redis has lost changes, after removals, and freeing them beside other work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import pytest

from gateway.catalogues.copies import Copies, Copy, Mark
from gateway.catalogues.freeing import FREED_AT_ONCE
from gateway.catalogues.order import ChangeOrder
from gateway.catalogues.record import packed
from gateway.catalogues.scripts import MOST_CHANGES, REMOVED_BYTES
from gateway.catalogues.store import CATALOGUE_BYTES, CatalogueStore, Missing, WarmUp
from tests.gateway.catalogues.conftest import KINDS, SPEC, first, items, store
from tests.redis import RedisServer

NOW = WarmUp(model="m", state="running", items=1, total=2, cached_items=0, computed_tokens=3, pinned_items=0, updated=1)


@contextmanager
def losing_what_follows(server: RedisServer) -> Iterator[None]:
    """At the end of the block, Redis has the data from its beginning: a replica that lagged takes over."""
    with server.client() as raw:
        kept: dict[bytes, Any] = {key: raw.dump(key) for key in raw.keys("*")}
        yield
        raw.flushall()
        for key, value in kept.items():
            raw.restore(key, 0, value)


def kept(gateway: CatalogueStore) -> dict[str, bytes]:
    """The copies of catalogue `c`."""
    copy: Copy | None = gateway._copies.known("o", "c")  # type: ignore[attr-defined]
    return {} if copy is None else copy.records


@pytest.mark.parametrize("later", [0, 1, 2, 3, 7])
async def test_copies_of_lost_changes_are_not_served(request: pytest.FixtureRequest, redis: RedisServer, later: int) -> None:
    """Gateway `one` has copies of version 4; Redis loses the last two changes. Then ``later`` other changes follow, so that the
    version is below, at or above 4 when `one` asks again."""
    async with store(request, "redis", gateways=2) as (_, (one, two)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(1, 2), 0)
        with losing_what_follows(redis):
            await one.put("o", "c", epoch, [("i1", packed([100], "")), ("i2", packed([200], ""))], 0)
            assert await first(one, ["i1", "i2"]) == [100, 200]
        for value in range(later):
            await two.put("o", "c", epoch, [("i1", packed([value + 7], ""))], 0)
        expected = [later + 6 if later else 1, 2]
        for each in (one, two, one):
            assert await first(each, ["i1", "i2"]) == expected


def test_an_answer_about_other_copies_moves_nothing() -> None:
    copies = Copies(1 << 20)
    copy = copies.follow("o", "c", Mark(-1, ""), "e", Mark(1, "a"), None)
    assert copy is not None
    copies.keep(copy, Mark(1, "a"), {"i": b"old"})
    assert copies.follow("o", "c", Mark(1, "a"), "e", Mark(2, "b"), []) is copy
    assert copies.follow("o", "c", Mark(1, "a"), "e", Mark(3, "x"), []) is None, "asked before the copies were at 2-b"
    assert copies.follow("o", "c", Mark(1, "a"), "e", Mark(2, "b"), ["i"]) is copy
    assert copy.records == {"i": b"old"}
    copies.keep(copy, Mark(1, "a"), {"j": b"read before the change"})
    assert copy.records == {"i": b"old"}


async def test_a_request_that_is_overtaken_again_and_again_reads_without_copies(request: pytest.FixtureRequest) -> None:
    async with store(request, "redis", gateways=2) as (_, (one, two)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(1, 2), 0)
        await first(one, ["i1"])
        follow, moves = one._copies.follow, []  # type: ignore[attr-defined]

        def overtaken(owner: str, name: str, asked: Mark, *rest: Any) -> Copy | None:
            moves.append(asked)
            follow(owner, name, asked, epoch, Mark(50 + len(moves), "other"), None)
            copy: Copy | None = follow(owner, name, asked, *rest)
            return copy

        one._copies.follow = overtaken  # type: ignore[attr-defined]
        assert await first(one, ["i1", "i2"]) == [1, 2]
        assert len(moves) == 3
        del one._copies.follow  # type: ignore[attr-defined]
        await two.put("o", "c", epoch, [("i1", packed([9], ""))], 0)
        assert await first(one, ["i1", "i2"]) == [9, 2]


async def test_removals_drop_only_copies_of_removed_items(request: pytest.FixtureRequest) -> None:
    async with store(request, "redis", gateways=2) as (now, (one, two)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(*range(20, 25)), int(now() * 1000) + 1000)
        await one.put("o", "c", epoch, items(*range(10)), 0)
        ids = [f"i{number}" for number in (*range(10), *range(20, 25))]
        await first(two, ids)
        now.seconds += 2
        await one.remove("o", "c", ["i3", "nobody"])
        await one.put("o", "c", epoch, [("i4", packed([40], ""))], 0)
        await first(two, [])
        assert set(kept(two)) == {f"i{number}" for number in range(10)} - {"i3", "i4"}
        await one.put("o", "c", epoch, [("i3", packed([30], ""))], 0)
        assert await first(two, ids) == [0, 1, 2, 30, 40, 5, 6, 7, 8, 9, *[None] * 5]


async def test_removed_ids_are_bounded_and_counted(request: pytest.FixtureRequest, redis: RedisServer) -> None:
    async with store(request, "redis", gateways=2) as (_, (one, two)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        many = MOST_CHANGES + 300
        await one.put("o", "c", epoch, items(*range(many)), 0)
        await first(two, ["i1", f"i{many - 1}"])
        await one.remove("o", "c", [f"i{number}" for number in range(many - 1)])
        assert await first(two, ["i1", f"i{many - 1}"]) == [None, many - 1]
        await one.remove("o", "c", [f"i{many - 1}"])
        with redis.client() as raw:
            (gone,) = raw.keys("*:gone")
            (stamps,) = raw.keys("*:stamps")
            ids = raw.zrange(gone, 0, -1)
            assert len(ids) == MOST_CHANGES
            assert raw.llen(stamps) <= MOST_CHANGES + 1
        state = await one.state("o", "c")
        assert state.bytes == CATALOGUE_BYTES + sum(REMOVED_BYTES + len(id) for id in ids)
        await one.put("o", "c", epoch, items(*range(many)), 0)
        await one.delete("o", "c")
        with redis.client() as raw:
            assert [key for key in raw.keys("*") if epoch.encode() in key] == []
            assert raw.hgetall("p:{catalogues}:sizes") == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_warm_up_of_a_deleted_catalogue_leaves_nothing(request: pytest.FixtureRequest, kind: str) -> None:
    async with store(request, kind) as (_, (one,)):
        before = (await one.create("o", "c", SPEC)).epoch
        await one.note_warm_up("o", "c", before, NOW)
        state = await one.state("o", "c")
        assert (state.warm_up, state.warmed) == (NOW, None)
        await one.delete("o", "c")
        with pytest.raises(Missing):
            await one.note_warm_up("o", "c", before, NOW, 3)
        await one.create("o", "c", SPEC)
        with pytest.raises(Missing):
            await one.note_warm_up("o", "c", before, NOW, 3)
        assert (await one.state("o", "c")).warmed is None
        if kind == "redis":
            with request.getfixturevalue("redis").client() as raw:
                assert [key for key in raw.keys("*") if before.encode() in key] == []


async def test_many_copies_are_freed_in_slices() -> None:
    copies, many = Copies(1 << 30), 3 * FREED_AT_ONCE + 10
    copy = copies.follow("o", "c", Mark(-1, ""), "e", Mark(1, "a"), None)
    assert copy is not None
    copies.keep(copy, Mark(1, "a"), {f"i{number}": b"record" for number in range(many)})
    copies.follow("o", "c", Mark(1, "a"), "e", Mark(2, "b"), None)
    assert (copies.bytes, copy.records) == (0, {})
    left = []
    while entries := copies._waste.entries:
        left.append(entries)
        await asyncio.sleep(0)
    assert len(left) >= 4
    assert max(before - after for before, after in zip(left, [*left[1:], 0], strict=True)) <= FREED_AT_ONCE


@pytest.mark.parametrize("kind", ["memory"])
async def test_a_page_of_a_large_catalogue_passes_over_few_items(request: pytest.FixtureRequest, kind: str) -> None:
    async with store(request, kind) as (_, (one,)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        many = 50_000
        await one.put("o", "c", epoch, [(f"i{number}", b"\0" * 28) for number in range(many)], 0)
        await one.put("o", "c", epoch, [(f"i{number}", b"\1" + b"\0" * 27) for number in range(0, many, 2)], 0)
        await one.remove("o", "c", [f"i{number}" for number in range(1000)])
        catalogue = one._find("o", "c")  # type: ignore[attr-defined]

        class Unlistable(dict[str, Any]):
            def __iter__(self) -> Iterator[str]:
                raise AssertionError("all ids are listed")

        catalogue.items = Unlistable(catalogue.items)
        found, after = list[str](), cast(int | None, 0)
        while after is not None:
            page = await one.page("o", "c", after, 1000)
            found += [id for id, _ in page.items]
            after = page.next
        odd = [f"i{number}" for number in range(1001, many, 2)]
        assert found == odd + [f"i{number}" for number in range(1000, many, 2)]
        pages = [[id for id, _ in page] async for page in one.pages("o", "c", epoch)]
        assert list(chain.from_iterable(pages)) == found
        assert max(map(len, pages)) == 500


def test_the_order_of_changes_gives_memory_back() -> None:
    order, newest = ChangeOrder(), dict[str, int]()
    for version in range(20_000):
        id = f"i{version % 7 if version % 512 else version}"
        if id in newest:
            order.remove(newest[id])
        newest[id] = version
        order.add(version, id)
    assert [id for _, id in order.after(-1)] == sorted(newest, key=lambda id: newest[id])
    assert order.oldest == "i512"
    assert max(block.__sizeof__() for block in order._blocks.values()) < 2000, "blocks with few entries are small"


async def test_a_listing_reads_on_behind_large_and_expired_items(request: pytest.FixtureRequest) -> None:
    async with store(request, "redis") as (now, (one,)):
        epoch = (await one.create("o", "c", SPEC)).epoch
        await one.put("o", "c", epoch, items(*range(900)), int(now() * 1000) + 1000)
        await one.put("o", "c", epoch, items(*range(900, 1900), size=600), 0)
        now.seconds += 2
        found, after, pages = list[str](), cast(int | None, 0), 0
        while after is not None:
            page = await one.page("o", "c", after, 1000)
            assert page.items
            found += [id for id, _ in page.items]
            after, pages = page.next, pages + 1
        assert found == [f"i{number}" for number in range(900, 1900)]
        assert pages > 1, "a page has at most about 2 MiB"
