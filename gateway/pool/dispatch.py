"""Sends a request to one replica of a model, and retries it on another replica where a retry may help."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import (
    AdapterNotFound,
    EngineLost,
    EngineSilent,
    GatewayError,
    InternalError,
    NotANumber,
    NotReady,
)
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import attempt, stage
from yardstick_llm.gateway.pool.connection import OnDelta
from yardstick_llm.gateway.pool.hedging import Ask, Hedge, Hedger
from yardstick_llm.gateway.pool.placement import PROMPT_AFFINITY, affinity_of
from yardstick_llm.gateway.pool.replica import Replica, ServedModel

logger = logging.getLogger(__name__)

EXPECTED_OUTPUT = 256
"""Output tokens assumed for the load estimate of a sequence with a larger ``max_tokens``; few sequences become longer."""

NOBODY = wire.Caller()

_FAULTS = (EngineLost, EngineSilent, InternalError)
"""Failures that count against the replica. Refusals (overload, an invalid request, no memory for it) do not count."""


@dataclass
class Attempts:
    """The replicas that a request was sent to, and the time that it may still wait for a replica."""

    wait_seconds: float
    """Remaining waiting time, in seconds."""
    replicas: list[Replica] = field(default_factory=list)
    """Replicas that must not get the request again."""
    sent: bool = False
    """Whether the request was sent to any replica."""
    number: int = 0
    """Number of replicas that were chosen so far."""


class _Tenant:
    """The waiting requests of one API key, oldest first."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.waits: list[asyncio.Timeout] = []

    def share(self, more: int = 0) -> float:
        """Places per unit of weight, with ``more`` places added."""
        return (len(self.waits) + more) / self.weight


class WaitingRoom:
    """``places`` for waiting requests. When all are taken, a new request evicts the newest request of the key with the most places
    per weight, unless its own key would then have more per weight. One key that floods the room cannot keep the others out."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._tenants: dict[str, _Tenant] = {}
        self.waiting = 0
        """Number of places that are taken."""

    async def wait(self, ready: Callable[[], Awaitable[object]], caller: wire.Caller) -> None:
        """Wait until ``ready()`` ends or the place is lost. Returns at once if there is no place."""
        tenant = self._tenants.get(caller.tenant) or _Tenant(caller.weight)
        if self.waiting >= self._places and not self._make_room(tenant):
            return
        self._tenants[caller.tenant] = tenant
        self.waiting += 1
        try:
            async with asyncio.timeout(None) as place:
                tenant.waits.append(place)
                try:
                    await ready()
                finally:
                    self._leave(tenant, caller.tenant, place)
        except TimeoutError:  # _make_room gave the place to another key
            return

    def _make_room(self, tenant: _Tenant) -> bool:
        """Take a place from the key with the largest share, if that makes the shares more even. Returns whether it did."""
        largest = max(self._tenants.values(), key=_Tenant.share, default=None)
        if largest is None or largest is tenant or largest.share(-1) < tenant.share(+1):
            return False
        newest = largest.waits.pop()
        self.waiting -= 1
        newest.reschedule(asyncio.get_running_loop().time())
        return True

    def _leave(self, tenant: _Tenant, name: str, place: asyncio.Timeout) -> None:
        if place in tenant.waits:
            tenant.waits.remove(place)
            self.waiting -= 1
        if not tenant.waits and self._tenants.get(name) is tenant:
            del self._tenants[name]


class Dispatcher:
    """Sends requests and updates replica health from the results. Each replica is tried once, until the first output is passed on.

    If no replica of a model takes requests, up to ``max_waiting`` requests wait for one, each for at most ``wait_seconds``. An API
    key that holds more than its share of these places loses them to other keys.
    """

    def __init__(self, telemetry: Telemetry, *, wait_seconds: float, max_waiting: int, hedge_budget: float = 0.0) -> None:
        """``hedge_budget``: tokens of hedges for each computed token; 0: no hedges."""
        self._hedger = Hedger(telemetry, self._record_failure, share=hedge_budget) if hedge_budget else None
        self._telemetry = telemetry
        self._wait_seconds = wait_seconds
        self._room = WaitingRoom(max_waiting)
        telemetry.waiting.set_function(lambda: self._room.waiting)

    def attempts(self) -> Attempts:
        """Create the state of a new request."""
        return Attempts(self._wait_seconds)

    async def call(
        self,
        model: ServedModel,
        ask: Ask,
        *,
        tokens: int,
        affinity: bytes | None = None,
        preferred: Replica | None = None,
        caller: wire.Caller = NOBODY,
        hedge: Hedge | None = None,
    ) -> wire.Scored:
        """Return the result of ``ask``. A retry may call it for several replicas, also after one has done part of the work.

        ``tokens`` is the load of the request. Requests with one ``affinity`` (at most 64 bytes) go to one replica until its load is
        too high. The request is sent to ``preferred`` first, if that takes requests. Its first attempt is hedged if ``hedge`` is
        given.
        """
        attempts = self.attempts()
        while True:
            replica = await self._choose(model, tokens, affinity, attempts, caller, preferred)
            try:
                if self._hedger is not None and hedge is not None:
                    hedged, hedge = hedge, None
                    return await self._hedger.ask(
                        model, replica, ask, hedged, tokens=tokens, tried=attempts.replicas, number=attempts.number
                    )
                with attempt(replica.client.url, model.name, attempts.number, tokens) as span, replica.busy(tokens), replica.wait():
                    answer = await ask(replica, span)
            except GatewayError as error:
                self._record_failure(error, replica, model)
                self.check_retry(error, model, attempts)
            else:
                replica.health.succeeded()
                return answer

    async def generate(
        self, model: ServedModel, generate: wire.Generate, attempts: Attempts, on_delta: OnDelta | None = None
    ) -> AsyncGenerator[list[wire.Delta], None]:
        """Yield batches of deltas. Close the iterator to abort. A failure after the first batch is raised;
        :mod:`gateway.generation.relay` then resumes the sequences. ``on_delta`` may process single deltas after the first batch."""
        sampling, length = generate.sampling, len(generate.prompt)
        tokens = length + sampling.n * min(sampling.max_tokens, EXPECTED_OUTPUT)
        affinity = affinity_of(generate.prompt[:PROMPT_AFFINITY], generate.caller, generate.adapter)
        while True:
            replica = await self._choose(model, tokens, affinity, attempts, generate.caller, saves=length)
            started, attempts.sent = False, True
            try:
                with attempt(replica.client.url, model.name, attempts.number, tokens) as span, replica.busy(tokens):
                    async with aclosing(replica.client.traced(span).generate(generate, on_delta)) as batches:
                        wait = replica.wait()
                        while True:
                            with wait:  # covers only this wait and not the processing of the batch
                                batch = await anext(batches, None)
                            if batch is None:
                                return
                            if not started:
                                started = True
                                if span is not None:
                                    span.event("first_token")
                                replica.health.succeeded()
                                replica.judge(spoilt=False)
                                attempts.replicas = [replica]  # others may recover before this one fails
                            yield batch
            except GatewayError as error:
                failure = (isinstance(error, NotANumber) and replica.judge(spoilt=True)) or error
                self._record_failure(failure, replica, model)
                if started:
                    raise
                self.check_retry(failure, model, attempts)

    def resumed(self, model: ServedModel) -> None:
        """Count a sequence that resumes on another replica."""
        self._telemetry.engines.resumptions.labels(model.name).inc()

    def check_retry(self, error: GatewayError, model: ServedModel, attempts: Attempts) -> None:
        """Return if another replica should be tried or waited for; otherwise raise ``error``."""
        ready = model.ready
        if not error.retryable or (ready and all(replica in attempts.replicas for replica in ready)):
            raise error
        if not ready:
            if attempts.wait_seconds <= 0:
                raise error
            attempts.replicas.clear()
        self._telemetry.engines.retries.labels(model.name, error.code or error.type).inc()

    async def _choose(
        self,
        model: ServedModel,
        tokens: int,
        affinity: bytes | None,
        attempts: Attempts,
        caller: wire.Caller,
        preferred: Replica | None = None,
        saves: int | None = None,
    ) -> Replica:
        """Choose a replica, and wait only if no replica takes requests. Raises :class:`NotReady`. ``saves``: see
        :meth:`ServedModel.choose`.

        The first attempt goes to a replica that terminates if there is no other: a request that was tokenised for a version of the
        model when its last replicas began to terminate would wait in vain for others, because another version replaces them.
        """
        ready = model.has_ready
        replica = None if ready or attempts.number else model.leaving
        if replica is None:
            if not ready:
                await self._wait(model, attempts, caller)
            replica = model.choose(tokens, affinity, attempts.replicas, preferred, saves)
        attempts.replicas.append(replica)
        attempts.number += 1
        return replica

    async def _wait(self, model: ServedModel, attempts: Attempts, caller: wire.Caller) -> None:
        self._telemetry.engines.missing.labels(model.base.name).inc()
        if attempts.wait_seconds <= 0:
            return
        began = time.monotonic()
        try:
            with stage("gateway.wait"):
                await self._room.wait(lambda: model.wait_ready(attempts.wait_seconds), caller)
        finally:
            attempts.wait_seconds -= time.monotonic() - began

    def _record_failure(self, error: GatewayError, replica: Replica, model: ServedModel) -> None:
        """Update the health of ``replica``. An unreachable pod is not chosen again before the pool has seen it ready."""
        self._telemetry.engines.errors.labels(model.name, error.code or error.type).inc()
        if error.status in (429, 503) and not replica.health.slow:  # a slow one is full when others are not
            model.refused()
        if isinstance(error, AdapterNotFound):
            model.lacks(replica)
        elif isinstance(error, NotReady):
            replica.ready = False
        elif isinstance(error, _FAULTS) and replica.health.failed():
            self._telemetry.engines.ejections.labels(model.name).inc()
            logger.warning("engine %s: ejected after %d failures", replica.client.url, replica.health.failures)
