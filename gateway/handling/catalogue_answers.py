"""The answer to a request for a whole catalogue: the best items, all results as they become known, or both."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

import msgspec
from litestar import Response

from gateway.cache.base import Row
from gateway.handling.catalogue_scan import Best, Result, Scan, Scanner
from gateway.handling.large import event_with_rows, with_rows
from gateway.handling.scoring import per_event
from gateway.handling.streams import DONE, sse
from gateway.pool.placement import cut
from gateway.process.time_slices import TimeSlice


class CatalogueForm(Protocol):
    """Makes the response of an endpoint from the results of one scan."""

    field: ClassVar[str]
    """Field of the answer that holds the results."""
    large: ClassVar[int]
    """Number of results above which the answer is built in slices."""

    @property
    def scan(self) -> Scan:
        """The scan."""

    def rank(self, row: Row) -> float:
        """Return the rank of an item; the best one has the highest."""

    def rows(self, results: list[Result]) -> Iterator[object]:
        """Yield the results of the answer."""

    def chunk(self, results: list[Result]) -> msgspec.Struct:
        """Return an event with some results."""

    def closing(self, best: list[Result]) -> msgspec.Struct:
        """Return the answer without results, when the scan has ended."""


async def answer_catalogue(scanner: Scanner, form: CatalogueForm, *, stream: bool, top_n: int | None) -> Response[Any]:
    """Return the ``top_n`` best items, or with ``stream`` the results as they become known. Raises :class:`GatewayError`."""
    scan = form.scan
    if stream:
        return scanner.scoring.streams.response(_events(scanner, form, top_n), scan.request)
    best = await scanner.best(scan, form.rank, top_n or 0)
    headers = {"x-yardstick-cache": f"{scan.hits}/{scan.items}"}
    return await with_rows(form.closing(best), form.field, form.rows(best), large=len(best) > form.large, headers=headers)


async def _events(scanner: Scanner, form: CatalogueForm, top_n: int | None) -> AsyncGenerator[bytes, None]:
    """Yield results, those that may be among the best if there is a ``top_n``, and the best at the end."""
    best, time_slice = Best(form.rank, top_n or 0), TimeSlice()
    async with aclosing(scanner.parts(form.scan)) as parts:
        async for part in parts:
            for few in cut(best.add(part) if top_n else part, per_event([result.row for result in part])):
                yield sse(form.chunk(few))
                if time_slice.over:
                    await time_slice.yield_to_loop()
    kept = best.results
    yield await event_with_rows(form.closing(kept), form.field, form.rows(kept))
    yield DONE
