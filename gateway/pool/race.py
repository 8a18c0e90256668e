"""A race: one score at two replicas, of which the first answer counts (:mod:`gateway.pool.hedging`)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from engine import wire
from gateway.errors import GatewayError
from gateway.ops.tracing import Stage, attempt
from gateway.pool.hedging import MIN_SECONDS, Ask, Hedge, Hedger

if TYPE_CHECKING:
    from gateway.pool.replica import Replica, ServedModel

logger = logging.getLogger(__name__)

Result = Literal["won", "lost", "failed"]


class Race:
    """One request to a replica and, if that is late, its hedge. The first request runs in the caller's task, because few requests
    are late; the hedge has a task, whose answer cancels the caller's wait."""

    __slots__ = (
        "_began",
        "_caller",
        "_delay",
        "_hedge",
        "_hedger",
        "_result",
        "_second",
        "_timer",
        "affinity",
        "first",
        "loop",
        "model",
        "number",
        "tokens",
        "tried",
    )

    def __init__(
        self,
        hedger: Hedger,
        model: ServedModel,
        first: Replica,
        hedge: Hedge,
        *,
        tokens: int,
        affinity: bytes | None,
        tried: list[Replica],
        number: int = 1,
    ) -> None:
        """``tried``: replicas that must not get the request again; the second one is added. ``number``: of the first attempt, in
        traces."""
        self._hedger = hedger
        self.model = model
        self.first = first
        self._hedge = hedge
        self.tokens = tokens
        self.affinity = affinity
        self.tried = tried
        self.number = number
        self.loop = asyncio.get_running_loop()
        self._began = self.loop.time()
        self._delay = model.hedges.delay(model, hedge.size, self._began)
        self._timer: asyncio.TimerHandle | None = None
        self._second: asyncio.Task[wire.Scored] | None = None
        self._caller: asyncio.Task[object] | None = None
        """The task that waits for the first replica; None before and after that."""
        self._result: Result = "lost"

    async def run(self, ask: Ask) -> wire.Scored:
        """Return the first answer. Raises :class:`GatewayError` of the first replica if there is none."""
        if self._delay is not None:
            self._wake_at(self._began + self._delay)
        try:
            return await self._first_answer(ask)
        finally:
            if self._second is not None:
                await self._end(self._second)

    async def _first_answer(self, ask: Ask) -> wire.Scored:
        caller = self._caller = asyncio.current_task()
        assert caller is not None
        cancelling = caller.cancelling()
        try:
            with self._span(self.first, self.number) as span, self.first.busy(self.tokens), self.first.wait():
                answer = await ask(self.first.client.traced(span))
        except asyncio.CancelledError:
            if self._result != "won" or caller.uncancel() > cancelling:  # another caller cancelled the task
                raise
            assert self._second is not None
            self._lost()
            return self._second.result()
        except GatewayError as error:
            self._leave()
            return await self._rescue(error)
        finally:
            self._leave()
        self._answered(self.first, answer, self.loop.time() - self._began)
        return answer

    def _leave(self) -> None:
        """Note that the first replica is not waited for any more."""
        self._caller = None
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, due: float) -> None:
        self._timer = self.loop.call_at(due, self._late, due)

    def _late(self, due: float) -> None:
        """Send the hedge, or try once more after the same time. If this gateway was blocked, the answer may have arrived meanwhile,
        so the hedge waits as long again."""
        assert self._delay is not None
        now = self.loop.time()
        last = now - self._began > 1.5 * self._delay
        if now - due > MIN_SECONDS:
            self._wake_at(2 * now - due)
        elif (second := self._hedger.second(self, self._delay, last=last)) is not None:
            self.tried.append(second)
            self._second = self.loop.create_task(self._second_answer(second))
            self._second.add_done_callback(self._second_ended)
        elif not last:
            self._wake_at(self._began + 2 * self._delay)

    async def _second_answer(self, second: Replica) -> wire.Scored:
        began = self.loop.time()
        try:
            with self._span(second, self.number + 1) as span, second.busy(self.tokens), second.wait():
                if span is not None:
                    span.attributes["yardstick.hedge"] = True
                answer = await self._hedge.ask(second.client.traced(span))
        except GatewayError as error:
            self._hedger.record_failure(error, second, self.model)
            raise
        self._answered(second, answer, self.loop.time() - began)
        return answer

    def _span(self, replica: Replica, number: int) -> AbstractContextManager[Stage | None]:
        return attempt(replica.client.url, self.model.name, number, self.tokens)

    def _second_ended(self, second: asyncio.Task[wire.Scored]) -> None:
        """End the wait for the first replica if the second has answered before it."""
        if self._caller is not None and not second.cancelled() and second.exception() is None:
            self._result = "won"
            self._caller.cancel()

    def _answered(self, replica: Replica, answer: wire.Scored, seconds: float) -> None:
        replica.health.succeeded(late=self._delay is not None and seconds > self._delay)
        replica.pace.add(self._hedge.size, seconds)
        replica.pace.queue_seconds = answer.queue_seconds
        if replica is self.first:
            self._hedger.earn(self.model, answer.computed_tokens)

    def _lost(self) -> None:
        self.first.pace.add(self._hedge.size, self.loop.time() - self._began)
        self._hedger.beaten(self.first, self.model)

    async def _rescue(self, error: GatewayError) -> wire.Scored:
        """Return the answer of the second replica after the first has failed. Raises ``error`` if there is none."""
        if self._second is None:
            raise error
        try:
            answer = await self._second
        except GatewayError:
            raise error from None
        self._result = "won"
        self._hedger.record_failure(error, self.first, self.model)
        return answer

    async def _end(self, second: asyncio.Task[wire.Scored]) -> None:
        """End the hedge, which closes its connection, and count its result."""
        self.model.hedges.running -= 1
        if not second.done():
            second.cancel()
            await asyncio.wait({second})
        if not second.cancelled() and (error := second.exception()) is not None:
            self._result = "failed"
            if not isinstance(error, GatewayError):
                logger.error("a hedge failed", exc_info=error)
        self._hedger.telemetry.engines.hedges.labels(self.model.base.name, self._result).inc()
