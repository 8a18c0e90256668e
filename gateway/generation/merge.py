"""Merges several streams into one, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from gateway.process.time_slices import Pace

T = TypeVar("T")


def merged(streams: Sequence[AsyncGenerator[T, None]], at_once: int = 64) -> AsyncGenerator[T, None]:
    """Yield every item of ``streams``; ``at_once`` of them run at a time. The first failure ends all, as closing does."""
    return streams[0] if len(streams) == 1 else _merged(streams, at_once)


async def _merged(streams: Sequence[AsyncGenerator[T, None]], at_once: int) -> AsyncGenerator[T, None]:
    arrived: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(maxsize=2 * at_once)
    waiting = iter(streams)

    pace = Pace()

    async def run() -> None:
        try:
            for stream in waiting:
                await pace.step()
                async with aclosing(stream):
                    async for news in stream:
                        await arrived.put((news,))
                        await pace.step()  # what follows, such as the end of the stream, may wait for the next iteration
                await arrived.put(None)
        except Exception as error:  # the consumer raises it
            await arrived.put(error)

    runs = [asyncio.create_task(run()) for _ in range(min(at_once, len(streams)))]
    try:
        unfinished = len(streams)
        while unfinished:
            arrival = await arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                unfinished -= 1
            else:
                yield arrival[0]
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
