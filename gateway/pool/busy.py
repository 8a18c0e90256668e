"""The use of a replica by a request: counted while it lasts, with a wait that others may end."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gateway.errors import EngineSilent

if TYPE_CHECKING:
    from gateway.pool.replica import Replica


class Wait:
    """Context manager around a task's wait for a pod. After :meth:`end` the block raises :class:`EngineSilent`.

    A stream enters it for every message: it takes 1 µs, and :func:`asyncio.timeout` takes 8 µs.
    """

    __slots__ = ("_cancelling", "_ended", "_task", "_waits")

    def __init__(self, waits: set[Wait]) -> None:
        """``waits`` contains this object while a task is in the block."""
        self._waits = waits
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._ended = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._waits.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waits.discard(self)
        if not self._ended:
            return
        assert self._task is not None
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:  # no other caller cancelled the task
            message = "The engine stopped answering; try again."
            raise EngineSilent(message, retry_after=1, retryable=True) from None

    def end(self) -> None:
        """Cancel the task's wait."""
        if self._task is not None and not self._ended:
            self._ended = True
            self._task.cancel()


class Busy:
    """Context manager around a request to a replica. It is no generator, because every request enters it."""

    __slots__ = ("_replica", "_tokens")

    def __init__(self, replica: Replica, tokens: int) -> None:
        self._replica = replica
        self._tokens = tokens

    def __enter__(self) -> None:
        self._replica.in_flight += 1
        self._replica.tokens += self._tokens

    def __exit__(self, *_: object) -> None:
        self._replica.in_flight -= 1
        self._replica.tokens -= self._tokens
