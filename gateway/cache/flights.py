"""Single flight: a request waits for results that another request is computing, instead of computing them again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from gateway.cache.base import Row
from gateway.ops.tracing import stage

Flight = asyncio.Future[Mapping[bytes, Row]]
"""A future with the results of all keys that were begun together. Keys whose computation failed or was abandoned are missing from
it; the waiting request then computes them. One future serves many keys, because creating ten thousand futures takes 10 ms."""


class Flights:
    """Results that requests of this process are computing."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Flight]:
        """Return the flights that will bring results of ``keys``."""
        return {key: self._flights[key] for key in keys if key in self._flights}

    @staticmethod
    async def wait(flights: Mapping[bytes, Flight]) -> dict[bytes, Row]:
        """Wait for ``flights`` and return their results; failed keys are missing. Cancelling the wait does not affect them."""
        if flights:
            with stage("gateway.shared"):
                await asyncio.wait(set(flights.values()))
        return {key: result for key, flight in flights.items() if (result := flight.result().get(key)) is not None}

    def begin(self, keys: Iterable[bytes]) -> None:
        """Start a flight for ``keys``, none of which is in flight. :meth:`end` must follow in every case."""
        flight: Flight = asyncio.get_running_loop().create_future()
        self._flights |= dict.fromkeys(keys, flight)

    def end(self, keys: Iterable[bytes], results: Mapping[bytes, Row]) -> None:
        """End the flight of ``keys``, all that were begun together, and give ``results`` to the waiting requests."""
        flights = {self._flights.pop(key) for key in keys}
        for flight in flights:
            flight.set_result(results)
