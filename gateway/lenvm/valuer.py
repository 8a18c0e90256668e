"""Length values of many texts, computed by engines in few messages."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence

import msgspec

from engine import wire
from gateway.errors import InternalError
from gateway.limits.base import Lease
from gateway.pool.client import EngineClient
from gateway.pool.dispatch import Dispatcher
from gateway.pool.replica import ServedModel
from gateway.scoring.scorer import SUB_BATCHES_PER_REPLICA, affinity_of, all_or_cancel
from gateway.scoring.split import split
from gateway.text.prepared import Ids, as_list


class Values(msgspec.Struct, frozen=True):
    """Length values of a request, and how they were obtained."""

    logits: list[float]
    """[text], z of v = σ(z)"""
    cached_tokens: int
    queue_seconds: float = 0.0
    """Longest time that a sub-batch of the request waited in an engine's queue."""


class Valuer:
    """Computes length values on engines. It uses the same splitting and dispatch as scoring."""

    def __init__(self, dispatcher: Dispatcher, *, split_tokens: int) -> None:
        """``split_tokens``: see :func:`gateway.scoring.split.split`."""
        self._dispatcher = dispatcher
        self._split_tokens = split_tokens

    async def values(
        self,
        model: ServedModel,
        texts: tuple[Ids, Sequence[Ids]],
        priority: int,
        caller: wire.Caller,
        lease: Lease | None = None,
    ) -> Values:
        """Return the values and record the messages to engines in ``lease``. Raises :class:`GatewayError` if an engine fails."""
        prefix, branches = as_list(texts[0]), texts[1]
        parts = split(
            len(prefix),
            [len(branch) for branch in branches],
            replicas=len(model.usable),
            split_tokens=self._split_tokens,
            max_branches=model.info.limits.max_branches,
        )
        gate = asyncio.Semaphore(SUB_BATCHES_PER_REPLICA * max(1, len(model.ready)))

        async def run(part: list[int], affinity: bytes | None) -> wire.Valued:
            async with gate:
                rows = [as_list(branches[place]) for place in part]
                request = wire.Value(uuid.uuid4().hex, prefix, rows, priority, caller=caller)
                return await self._ask(model, request, affinity, lease)

        first = affinity_of(prefix, caller)
        answers = await all_or_cancel([run(part, None if number else first) for number, part in enumerate(parts)])
        logits = [0.0] * len(branches)
        for part, answer in zip(parts, answers, strict=True):
            for place, logit in zip(part, answer.logits, strict=True):
                logits[place] = logit
        queue_seconds = max((answer.queue_seconds for answer in answers), default=0.0)
        return Values(logits, sum(answer.cached_tokens for answer in answers), queue_seconds)

    async def _ask(self, model: ServedModel, request: wire.Value, affinity: bytes | None, lease: Lease | None) -> wire.Valued:
        prefix, branches = len(request.prefix), list(map(len, request.branches))

        async def ask(client: EngineClient) -> wire.Valued:
            if lease is not None:
                lease.begin(request.id, tokens=prefix * len(branches) + sum(branches), items=len(branches))
            valued = await client.value(request)
            if len(valued.logits) != len(request.branches) or not all(map(math.isfinite, valued.logits)):
                message = "The engine's values are incomplete or not numbers; its length model may be broken."
                raise InternalError(message, retryable=True)
            return valued

        return await self._dispatcher.call(model, ask, tokens=prefix + sum(branches), affinity=affinity, caller=request.caller)
