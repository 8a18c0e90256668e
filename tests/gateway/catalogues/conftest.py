"""Both stores of catalogues, as tests begin them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from gateway.catalogues.copies import Copies
from gateway.catalogues.memory import MemoryCatalogues
from gateway.catalogues.record import packed, row_of
from gateway.catalogues.shared import RedisCatalogues
from gateway.catalogues.store import CatalogueStore, Spec
from gateway.ops.metrics import Telemetry
from gateway.redis.link import Link
from gateway.settings import CatalogueBounds
from gateway.text.catalogue import Template
from tests.gateway.conftest import closed
from tests.redis import RedisServer

SPEC = Spec(model="m", text="t", template=Template())
WIDE = CatalogueBounds(1 << 30, 1 << 30)
KINDS = ["memory", "redis"]


class Now:
    seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@asynccontextmanager
async def store(
    request: pytest.FixtureRequest, kind: str, bounds: CatalogueBounds = WIDE, *, gateways: int = 1, copies: int = 1 << 20
) -> AsyncIterator[tuple[Now, list[CatalogueStore]]]:
    """A store, as several gateways see it."""
    now = Now()
    if kind == "memory":
        yield now, [MemoryCatalogues(bounds, now)] * gateways
        return
    server = request.getfixturevalue("redis")
    with server.client() as plain:
        plain.flushall()
    links = [Link(Redis(port=server.port), Telemetry(), seconds=5) for _ in range(gateways)]
    try:
        for link in links:
            await closed(link)
        yield now, [RedisCatalogues(link, bounds, Copies(copies), Telemetry(), prefix="p", clock=now) for link in links]
    finally:
        for link in links:
            await link.stop()


def items(*numbers: int, tail: str = "", size: int = 4) -> list[tuple[str, bytes]]:
    return [(f"i{number}", packed([number] * size, tail)) for number in numbers]


async def first(stores: CatalogueStore, ids: list[str], owner: str = "o") -> list[int | None]:
    """The first token of each item; None for one that is not there."""
    found = (await stores.find(owner, "c", ids)).records
    return [None if record is None else row_of(record)[0][0] for record in found]
