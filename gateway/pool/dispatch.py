"""A request to one replica of a model, and to another where that may help."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine import wire
from gateway.errors import EngineLost, EngineSilent, GatewayError, InternalError, NotReady
from gateway.pool.client import EngineClient
from gateway.pool.replica import Replica, ServedModel, Wait
from gateway.pool.waiting import WaitingRoom
from gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)

EXPECTED_OUTPUT = 256
"""Tokens that a sequence counts for when it may become longer: few do."""

T = TypeVar("T")

NOBODY = wire.Caller()

_FAULTS = (EngineLost, EngineSilent, InternalError)
"""Failures that speak against the replica. Refusals (overload, a wrong request, no memory for it) do not."""


@dataclass
class Attempts:
    """Where a request has been sent, and how long it may still wait for a replica."""

    wait_seconds: float
    """Time that it may still wait, in seconds."""
    replicas: list[Replica] = field(default_factory=list)
    """Not to be asked again."""
    sent: bool = False
    """Some replica was given the request."""

    def progressed(self, replica: Replica) -> None:
        """``replica`` has answered: the others may have recovered by the time it is lost."""
        self.replicas = [replica]


class Dispatcher:
    """Sends requests, judges replicas by the results, and tries each once while nothing of an answer has been passed on.

    Where no replica of a model takes requests, up to ``max_waiting`` requests wait for one, each for ``wait_seconds``. A key that
    has more than its share of these places loses them to others.
    """

    def __init__(self, telemetry: Telemetry, *, wait_seconds: float, max_waiting: int) -> None:
        self._telemetry = telemetry
        self._wait_seconds = wait_seconds
        self._room = WaitingRoom(max_waiting)
        telemetry.waiting.set_function(lambda: self._room.waiting)

    def attempts(self) -> Attempts:
        """For a request that begins."""
        return Attempts(self._wait_seconds)

    async def call(
        self,
        model: ServedModel,
        ask: Callable[[EngineClient], Awaitable[T]],
        *,
        tokens: int,
        affinity: bytes | None = None,
        caller: wire.Caller = NOBODY,
    ) -> T:
        """The answer of ``ask``, which may be asked of several replicas, also when one has done some of the work.

        ``tokens`` is what the request costs; requests of one ``affinity`` (at most 64 bytes) go to one replica while it has not too
        much to do.
        """
        attempts = self.attempts()
        while True:
            replica = await self._choose(model, tokens, affinity, attempts, caller)
            try:
                with replica.busy(tokens), replica.wait():
                    answer = await ask(replica.client)
            except GatewayError as error:
                self._judge(error, replica)
                self.check_retry(error, model, attempts)
            else:
                replica.health.succeeded()
                return answer

    async def generate(
        self, model: ServedModel, generate: wire.Generate, attempts: Attempts
    ) -> AsyncGenerator[list[wire.Delta], None]:
        """Batches of deltas. Close the iterator to abort. A failure after the first is raised; :mod:`gateway.generation.relay`
        goes on from there."""
        sampling = generate.sampling
        tokens = len(generate.prompt) + sampling.n * min(sampling.max_tokens, EXPECTED_OUTPUT)
        while True:
            replica = await self._choose(model, tokens, None, attempts, generate.caller)
            started, attempts.sent = False, True
            try:
                with replica.busy(tokens):
                    async with aclosing(replica.client.generate(generate)) as batches:
                        wait = replica.wait()
                        while (batch := await _next(wait, batches)) is not None:
                            if not started:
                                started = True
                                replica.health.succeeded()
                                attempts.progressed(replica)
                            yield batch
                return
            except GatewayError as error:
                self._judge(error, replica)
                if started:
                    raise
                self.check_retry(error, model, attempts)

    def resumed(self) -> None:
        """A sequence is about to go on at another replica."""
        self._telemetry.resumptions.inc()

    def check_retry(self, error: GatewayError, model: ServedModel, attempts: Attempts) -> None:
        """Return where another replica should be asked, or waited for; raise ``error`` where not."""
        ready = model.ready
        if not error.retryable or (ready and all(replica in attempts.replicas for replica in ready)):
            raise error
        if not ready:
            if attempts.wait_seconds <= 0:
                raise error
            attempts.replicas.clear()
        self._telemetry.retried(error.code or error.type)

    async def _choose(
        self, model: ServedModel, tokens: int, affinity: bytes | None, attempts: Attempts, caller: wire.Caller
    ) -> Replica:
        """Waits only where no replica takes requests. Raises :class:`NotReady`."""
        if not model.ready:
            await self._wait(model, attempts, caller)
        replica = model.choose(tokens, affinity, attempts.replicas)
        attempts.replicas.append(replica)
        return replica

    async def _wait(self, model: ServedModel, attempts: Attempts, caller: wire.Caller) -> None:
        if attempts.wait_seconds <= 0:
            return
        began = time.monotonic()
        try:
            await self._room.wait(lambda: model.wait_ready(attempts.wait_seconds), caller)
        finally:
            attempts.wait_seconds -= time.monotonic() - began

    def _judge(self, error: GatewayError, replica: Replica) -> None:
        """A pod that cannot be reached is not chosen again before the pool has seen it ready."""
        self._telemetry.engine_failed(error.code or error.type)
        if isinstance(error, NotReady):
            replica.ready = False
        elif isinstance(error, _FAULTS) and replica.health.failed():
            self._telemetry.ejections.inc()
            logger.warning("engine %s: ejected after %d failures", replica.client.url, replica.health.failures)


async def _next(wait: Wait, batches: AsyncGenerator[list[wire.Delta], None]) -> list[wire.Delta] | None:
    """The next batch, None after the last. Only the wait for it may be ended, not what is done with it."""
    with wait:
        return await anext(batches, None)


def rest_of(generate: wire.Generate, output: list[int], index: int) -> wire.Generate:
    """What is left of one sequence of ``generate`` after ``output``, for any replica to go on with; also for one that still has the
    first attempt, or goes on with another sequence, so it is a request of its own."""
    return msgspec.structs.replace(
        generate,
        id=uuid.uuid4().hex,
        prompt=generate.prompt + output,
        resume_offset=generate.resume_offset + len(output),
        sampling=msgspec.structs.replace(generate.sampling, n=1),
        index=generate.index + index,
        prompt_logprobs=None if output or index else generate.prompt_logprobs,
    )
