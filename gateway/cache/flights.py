"""Single flight: what one request is computing, another that needs the same waits for instead of computing it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from gateway.cache.base import Logprobs

Flight = asyncio.Future[Logprobs | None]
"""Ends with the result, or with None where whoever computed it failed or gave up: then the one who waits computes it."""


class Flights:
    """Results that are on their way in this process."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Flight]:
        """The flights that will bring results of ``keys``."""
        return {key: self._flights[key] for key in keys if key in self._flights}

    @staticmethod
    async def wait(flights: Mapping[bytes, Flight]) -> dict[bytes, Logprobs]:
        """What ``flights`` bring, without those that bring nothing. Leaving early does them no harm."""
        if flights:
            await asyncio.wait(flights.values())
        return {key: result for key, flight in flights.items() if (result := flight.result()) is not None}

    def begin(self, keys: Iterable[bytes]) -> None:
        """Promise the results of ``keys``, none of which is on its way; :meth:`end` must follow, whatever happens."""
        loop = asyncio.get_running_loop()
        self._flights |= {key: loop.create_future() for key in keys}

    def end(self, keys: Iterable[bytes], results: Mapping[bytes, Logprobs]) -> None:
        """Give those who wait for ``keys`` what there is."""
        for key in keys:
            flight = self._flights.pop(key)
            if not flight.done():
                flight.set_result(results.get(key))
