"""Other engines compute the items of a draining engine in advance, while they have no other work."""

from __future__ import annotations

import asyncio
import tracemalloc
from array import array
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine import wire
from gateway.metrics.telemetry import Telemetry
from gateway.pool import handover
from gateway.pool.client import Connections, EngineClient
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut
from gateway.pool.handover import PART_TOKENS, Handover, parts_of
from gateway.pool.placement import assign, item_digests
from gateway.pool.prompts import Prompts
from gateway.pool.recent_items import FORGOTTEN_BYTES, ITEM_BYTES, RecentItem, RecentItems, Room
from gateway.pool.replica import Replica, ServedModel
from tests.fakes import FakeEngine, ids, items_of, served
from tests.gateway.conftest import Start, metric
from tests.prefixes import PrefixCache
from tests.processes import until, wait_until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def remember(items: RecentItems, *numbers: int, tokens: int = 10, pin_seconds: float | None = None) -> None:
    items.add(numbers, [array("I", [number] * tokens) for number in numbers], "", pin_seconds)


def taken(items: RecentItems) -> list[int]:
    return [item.ids[0] for item in items.take()]


def test_the_items_used_last_are_remembered_within_bounds() -> None:
    by_number, by_bytes, none = RecentItems(3), RecentItems(100, Room(3 * (ITEM_BYTES + 40) + 39)), RecentItems(0)
    for items in (by_number, by_bytes, none):
        remember(items, 1, 2, 3, 4)
    assert (taken(by_number), taken(by_bytes), taken(none)) == ([4, 3, 2], [4, 3, 2], [])
    assert taken(by_number) == []
    remember(by_bytes, 5, tokens=1000)
    assert taken(by_bytes) == [], "one that is too long does not stay"


def test_the_items_of_all_engines_share_one_room() -> None:
    """Engines that are used alike have equal parts, and one that is gone leaves its own."""
    most = 1 << 20
    room = Room(most)
    first = RecentItems(1 << 20, room)
    remember(first, *range(10_000))
    assert most - ITEM_BYTES - 40 < first.bytes == room.bytes <= most
    rest = [RecentItems(1 << 20, room) for _ in range(63)]
    for number in range(100):
        for items in (first, *rest):
            remember(items, number)
            assert room.bytes <= most
    assert room.bytes == sum(items.bytes for items in (first, *rest))
    assert all(abs(items.bytes - most / 64) <= FORGOTTEN_BYTES for items in (first, *rest))
    assert {len(items) for items in rest} <= {64, 65, 66}, "1.5 MiB of items in a room of 1 MiB"
    used = first.bytes
    first.close()
    assert room.bytes == sum(items.bytes for items in rest)
    remember(first, 1, 2, 3)
    assert (first.bytes, len(first.take()) > 0, room.bytes) == (used, True, sum(items.bytes for items in rest))


def test_the_bytes_of_an_item_are_what_it_takes() -> None:
    room = Room(1 << 30)
    items = RecentItems(1 << 20, room)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5000):
            items.add([hash(str(number))], [array("I", [7] * 180)], "", None)
        taken_up = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert room.bytes == pytest.approx(taken_up, rel=0.1)


def test_a_scan_does_not_displace_items_that_are_used_again() -> None:
    items = RecentItems(10)
    for _ in range(2):
        remember(items, 1, 2, 3)
    remember(items, *range(100, 110))
    assert {1, 2, 3} <= set(taken(items))


def test_pinned_items_go_first_then_those_used_again() -> None:
    clock = Clock()
    items = RecentItems(100, clock=clock)
    remember(items, 1, 2, pin_seconds=60.0)
    remember(items, 3, pin_seconds=5.0)
    remember(items, 4, 5, 6)
    remember(items, 4)
    clock.now += 10
    assert taken(items) == [2, 1, 4, 6, 5, 3]


def test_parts_are_bounded_and_of_one_salt() -> None:
    items = [RecentItem(array("I", [1] * tokens).tobytes(), salt) for salt in ("a", "b") for tokens in (5000, 3000, 200, 9000, 1)]
    parts = list(parts_of(items[::2] + items[1::2], 0.0))
    assert sum(len(part) for part in parts) == len(items)
    for part in parts:
        assert len({item.salt for item in part}) == 1
        assert len(part) == 1 or sum(item.tokens for item in part) <= PART_TOKENS


@dataclass
class Fleet:
    """Three engines, and what a gateway has to reach them."""

    engines: list[FakeEngine]
    model: ServedModel
    fan_out: FanOut
    telemetry: Telemetry = field(default_factory=Telemetry)

    def handover(self, seconds: float = 10.0) -> Handover:
        return Handover(self.fan_out, self.telemetry, seconds=seconds)

    async def score(self, items: list[list[int]], salt: str = "", pin_seconds: float | None = None) -> int:
        """Score items; return how many engines had."""
        found = []
        asked = Prompts((), items, wire.Labels([3]), 0, wire.Caller(cache_salt=salt), [5, 6], pin_seconds)
        await self.fan_out.run(self.model, asked, items, lambda _, scored: found.append(scored.cached_items), None)
        return sum(found)

    def drain(self, place: int = 0) -> Replica:
        self.model.replicas[place].draining = True
        for engine in self.engines:
            engine.item_scores.clear()
        return self.model.replicas[place]

    def moved(self, result: str) -> float:
        name = f'yardstick_moved_items_total{{result="{result}"}} '
        text = b"".join(self.telemetry.exposition()).decode()
        return next((float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)), 0.0)


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    engines, connections, telemetry = [FakeEngine(prefixes=PrefixCache()) for _ in range(3)], Connections(), Telemetry()
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine)) for engine in engines]
        replicas = [
            Replica(EngineClient(url, connections, connect_seconds=1, engine_seconds=5), items=RecentItems(1000), ready=True)
            for url in urls
        ]
        model = ServedModel(engines[0].info(), None, "", replicas)  # type: ignore[arg-type]
        dispatcher = Dispatcher(telemetry, wait_seconds=1, max_waiting=10)
        yield Fleet(engines, model, FanOut(dispatcher, telemetry, split_tokens=64), telemetry)
        await connections.close()


def some_items(count: int = 90) -> list[list[int]]:
    return [[number, number % 7, 3, 4, 5] for number in range(count)]


def placed(model: ServedModel, place: int, items: list[list[int]], salt: str = "") -> list[list[int]]:
    """The items that belong to one replica."""
    chosen = assign(model.usable, list(item_digests(items, salt)), [1] * len(items))[place]
    return [items[index] for index in chosen]


async def test_items_move_to_where_requests_look_for_them() -> None:
    async with fleet() as found:
        items = some_items()
        await found.score(items)
        mine = placed(found.model, 0, items)
        found.handover().begin(found.model, found.drain())
        await until(lambda: found.moved("computed") == len(mine))
        asked = [message for engine in found.engines for message in engine.item_scores]
        assert sorted(item for message in asked for item in items_of(message)) == sorted(mine)
        assert {(message.priority, message.caller.tenant, message.caller.weight) for message in asked} == {(100, "handover", 0.001)}
        assert found.engines[0].item_scores == []
        assert await found.score(items) == 90
        again = found.drain(1)
        found.handover().begin(found.model, again)
        await until(lambda: found.moved("computed") + found.moved("cached") > len(mine) + 20)
        assert await found.score(items) == 90, "items that have moved once move again"


async def test_salts_and_pins_are_kept() -> None:
    async with fleet() as found:
        items = some_items(40)
        for salt in ("mine", "theirs"):
            await found.score(items[:20], salt)
            await found.score(items[20:], salt, pin_seconds=60.0)
        mine = len(found.model.replicas[0].items)
        found.handover().begin(found.model, found.drain())
        await until(lambda: found.moved("computed") == mine)
        for salt in ("mine", "theirs"):
            assert await found.score(items, salt) == 40
        asked = [message for engine in found.engines for message in engine.item_scores if message.caller.tenant == "handover"]
        pinned = {tuple(item): message.pin_seconds for message in asked for item in items_of(message)}
        assert all((seconds is not None) is (list(item) in items[20:]) for item, seconds in pinned.items())
        assert all(50 < seconds <= 60 for seconds in pinned.values() if seconds is not None)
        assert asked[0].pin_seconds is not None, "pinned items are the first"


async def test_nothing_moves_while_engines_are_busy_or_without_time() -> None:
    async with fleet() as found:
        await found.score(some_items())
        mine = len(found.model.replicas[0].items)
        found.model.replicas[2].tokens = handover.BUSY_TOKENS + 1
        found.handover(seconds=0.2).begin(found.model, found.drain())
        await until(lambda: found.moved("left") == mine)
        assert [engine.item_scores for engine in found.engines] == [[], [], []]


@pytest.mark.parametrize("end", ["gone", "silent", "back", "stopped"])
async def test_it_ends_with_its_reason(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PART_TOKENS", 20)
    async with fleet() as found:
        await found.score(some_items())
        mine = len(found.model.replicas[0].items)
        leaving = found.drain()
        for engine in found.engines:
            engine.faults.delay = 0.05
        mover = found.handover()
        mover.begin(found.model, leaving)
        await until(lambda: found.moved("computed") > 0)
        if end == "stopped":
            await mover.stop()
        elif end == "back":
            leaving.draining = False
        else:
            setattr(leaving, end, True)
        await until(lambda: found.moved("left") > 0)
        assert found.moved("left") + found.moved("computed") == pytest.approx(mine, abs=4)
        await asyncio.sleep(0.1)  # a message that was sent before arrives
        seen = sum(len(engine.item_scores) for engine in found.engines)
        await asyncio.sleep(0.1)
        assert sum(len(engine.item_scores) for engine in found.engines) == seen


async def test_engines_that_refuse_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is not repeated, and the next one waits."""
    monkeypatch.setattr(handover, "PART_TOKENS", 20)
    async with fleet() as found:
        await found.score(some_items())
        leaving = found.drain()
        mine = len(leaving.items)
        for engine in found.engines:
            engine.faults.fail = wire.Failed("", "overloaded", "The queue is full.", retryable=True)
        found.handover(seconds=0.5).begin(found.model, leaving)
        await until(lambda: found.moved("left") > 0)
        assert (found.moved("computed"), found.moved("left")) == (0, mine), "an item that no engine computed has not moved"
        assert sum(len(engine.item_scores) for engine in found.engines) <= 4
        assert [replica.health.failures for replica in found.model.replicas] == [0, 0, 0]


async def test_items_of_an_adapter_that_is_gone_are_left() -> None:
    async with fleet() as found:
        leaving = found.model.replicas[0]
        leaving.items.add([1, 2], [array("I", [1]), array("I", [2])], "", None, adapter="gone")
        found.handover().begin(found.model, found.drain())
        await until(lambda: found.moved("left") == 2)
        assert [engine.item_scores for engine in found.engines] == [[], [], []]


async def test_the_items_of_an_only_engine_move_to_one_that_is_ready_later() -> None:
    async with fleet() as found:
        first, second, third = found.model.replicas
        second.ready = third.ready = False
        await found.score(some_items(), pin_seconds=60.0)
        assert len(first.items) == 90, "also while there was nowhere else to place them"
        mover = found.handover()
        for _ in range(3):  # as each probe does
            mover.begin(found.model, found.drain())
        await asyncio.sleep(2 * handover.PAUSE_SECONDS)
        assert (found.moved("left"), len(first.items)) == (0, 90)
        second.ready = True
        await until(lambda: found.moved("computed") == 90)
        assert await found.score(some_items()) == 90


@pytest.mark.parametrize("end", ["late", "gone", "back"])
async def test_a_handover_without_another_engine_ends(end: str) -> None:
    async with fleet() as found:
        first, second, third = found.model.replicas
        second.ready = third.ready = False
        await found.score(some_items())
        mover = found.handover(seconds=0.1 if end == "late" else 10.0)
        mover.begin(found.model, found.drain())
        await asyncio.sleep(2 * handover.PAUSE_SECONDS)
        if end == "gone":
            first.leave()
        elif end == "back":
            first.draining = False
        await until(lambda: not mover._running)
        assert (found.moved("left"), len(first.items)) == ((0, 90) if end == "back" else (90, 0))


@pytest.fixture(params=[10_000, 0], ids=["on", "off"])
def three(request: pytest.FixtureRequest, start: Start) -> tuple[httpx.Client, list[FakeEngine], bool]:
    engines = [FakeEngine(prefixes=PrefixCache()) for _ in range(3)]
    return start(*engines, handover_items=request.param), engines, request.param > 0


def test_the_first_requests_after_a_drain_find_their_items(three: tuple[httpx.Client, list[FakeEngine], bool]) -> None:
    client, engines, on = three
    client.put("/v1/catalogues/shop", json={"template": "{item}\nQuestion: {query}"}).raise_for_status()
    texts = {f"i{place}": f"{place} is the number of a quick brown fox that jumps" for place in range(90)}
    body: Any = [{"id": id, "text": text} for id, text in texts.items()]
    client.put("/v1/catalogues/shop/items", json=body).raise_for_status()

    def cached_tokens(query: str) -> int:
        body = {"query": query, "catalogue": "shop", "ids": list(texts), "labels": [" Yes"]}
        usage = client.post("/v1/score", json=body).raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached_tokens("red?")
    warm = cached_tokens("blue?")
    assert warm >= sum(len(ids(text)) for text in texts.values())
    engines[0].ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 2)
    if on:
        wait_until(lambda: metric(client, 'yardstick_moved_items_total{result="computed"}') > 15)
        wait_until(lambda: not any(engine.running for engine in engines))
    after = cached_tokens("fox?")
    assert after == warm if on else after < 0.8 * warm


def test_the_items_of_an_only_engine_move_to_its_replacement(start: Start) -> None:
    """The old engine drains a moment before the new one is ready, as in a rolling update."""
    engines = [FakeEngine(prefixes=PrefixCache()) for _ in range(2)]
    client = start(*engines)
    engines[1].ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    body = {"query": [5, 6], "items": some_items(40), "label_token_ids": [3], "item_first": True}

    def cached_tokens() -> int:
        answer = client.post("/v1/score", json=body, headers={"cache-control": "no-cache"}).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached_tokens() == 0
    engines[0].ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    engines[1].ready = True
    wait_until(lambda: metric(client, 'yardstick_moved_items_total{result="computed"}') == 40)
    assert cached_tokens() == 200
    assert metric(client, 'yardstick_moved_items_total{result="left"}') == 0
