"""Single flight: what one request is computing, another that needs the same waits for instead of computing it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from gateway.cache.base import Logprobs

Flight = asyncio.Future[Mapping[bytes, Logprobs]]
"""Ends with the results of all keys that were begun together, without those that whoever computed them failed at or gave up: then
the one who waits computes them. One future for many keys, as making ten thousand takes 10 ms."""


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
            await asyncio.wait(set(flights.values()))
        return {key: result for key, flight in flights.items() if (result := flight.result().get(key)) is not None}

    def begin(self, keys: Iterable[bytes]) -> None:
        """Promise the results of ``keys``, none of which is on its way; :meth:`end` must follow, whatever happens."""
        flight: Flight = asyncio.get_running_loop().create_future()
        self._flights |= dict.fromkeys(keys, flight)

    def end(self, keys: Iterable[bytes], results: Mapping[bytes, Logprobs]) -> None:
        """Give those who wait for ``keys``, all that were begun together, what there is."""
        flights = {self._flights.pop(key) for key in keys}
        for flight in flights:
            flight.set_result(results)
