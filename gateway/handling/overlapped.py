"""Runs the parts of a long request, a few at one time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def overlapped(parts: AsyncGenerator[Coroutine[Any, Any, T], None], most: Callable[[], int]) -> AsyncGenerator[T, None]:
    """Run coroutines, at most ``most()`` at one time, and yield their results in order.

    The error of a part is raised in its place. When the generator ends or is closed, the parts that still run are cancelled, and
    ``parts`` is closed.
    """
    begun: deque[asyncio.Task[T]] = deque()
    try:
        async with aclosing(parts):
            async for part in parts:
                begun.append(asyncio.create_task(part))
                while begun and (begun[0].done() or len(begun) >= most()):
                    yield await begun.popleft()
        while begun:
            yield await begun.popleft()
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
