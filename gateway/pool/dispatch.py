"""A request to one replica of a model, and to another where that may help."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine import wire
from gateway.errors import GatewayError, NotReady
from gateway.pool.replica import Replica, ServedModel
from gateway.telemetry import Telemetry


class Dispatcher:
    """Sends requests, counts failures, and tries each ready replica once while nothing of an answer has been passed on."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def score(self, model: ServedModel, score: wire.Score) -> wire.Scored:
        """One sub-batch; a score can be asked for twice without harm."""
        tried: list[Replica] = []
        while True:
            replica = model.choose(tried)
            tried.append(replica)
            try:
                with replica.busy():
                    return await replica.client.score(score)
            except GatewayError as error:
                self._judge(error, replica, model, tried)

    async def generate(self, model: ServedModel, generate: wire.Generate) -> AsyncGenerator[list[wire.Delta], None]:
        """Batches of deltas. Close the iterator to abort."""
        tried: list[Replica] = []
        started = False
        while True:
            replica = model.choose(tried)
            tried.append(replica)
            try:
                with replica.busy():
                    async with aclosing(replica.client.generate(generate)) as batches:
                        async for batch in batches:
                            started = True
                            yield batch
                return
            except GatewayError as error:
                self._judge(error, replica, model, tried, started=started)

    def _judge(
        self, error: GatewayError, replica: Replica, model: ServedModel, tried: list[Replica], *, started: bool = False
    ) -> None:
        """Return where another replica should be tried; raise ``error`` where not. A pod that cannot be reached is not chosen
        again before the pool has seen it ready."""
        self._telemetry.engine_failed(error.code or error.type)
        if isinstance(error, NotReady):
            replica.ready = False
        if started or not error.retryable or all(other in tried for other in model.ready):
            raise error
