"""Divides prefill-only requests into sub-batches and sends them to replicas: the one fan-out of all readouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from engine import wire
from gateway.errors import GatewayError
from gateway.limits.base import Lease
from gateway.ops.metrics import Telemetry
from gateway.pool.client import EngineClient
from gateway.pool.dispatch import Dispatcher
from gateway.pool.faults import check_rows, numbers_of, overflow
from gateway.pool.hedging import Hedge
from gateway.pool.items import divide_items
from gateway.pool.messages import divided_by_images, message_of, without_keeping
from gateway.pool.pace import size_class
from gateway.pool.placement import affinity_of
from gateway.pool.prompts import Prompts, SubBatch
from gateway.pool.replica import ServedModel
from gateway.pool.split import SplitTokens, split
from gateway.text.prepared import Ids

SUB_BATCHES_PER_REPLICA = 2
"""Sub-batches of one request in flight for each ready replica: one runs and one waits in the engine's queue, so that a large
request leaves room for others."""

LARGE_TOKENS, LARGE_BRANCHES = 1 << 15, 1 << 11
"""Tokens and branches of a request above which its messages are built and sent one by one, so that the event loop serves others in
between."""

OnScored = Callable[[list[int], wire.Scored], None]
"""Receives the indices of the branches of a sub-batch, and the engine's answer."""

OnError = Callable[[list[int], GatewayError], None]
"""Receives the indices of the branches of a sub-batch that no engine could compute, and the last error."""


class FanOut:
    """Sends requests through ``dispatcher``, divided so that all replicas work."""

    def __init__(
        self, dispatcher: Dispatcher, telemetry: Telemetry, *, split_tokens: int, idle_split_tokens: int | None = None
    ) -> None:
        """``split_tokens``, ``idle_split_tokens``: see :class:`SplitTokens`; None means ``split_tokens``."""
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._split_tokens = SplitTokens(split_tokens, idle_split_tokens or split_tokens)

    async def run(
        self,
        model: ServedModel,
        prompts: Prompts,
        branches: Sequence[Ids],
        on_scored: OnScored,
        lease: Lease | None,
        *,
        on_error: OnError | None = None,
    ) -> None:
        """Compute ``branches``, some of those of ``prompts``, and pass each answer to ``on_scored`` as it arrives.

        The messages to engines are recorded in ``lease``. A sub-batch that no engine could compute is passed to ``on_error``;
        without it the sub-batch's :class:`GatewayError` is raised, and the sub-batches that are still running are cancelled.
        """
        in_flight, building = asyncio.Semaphore(SUB_BATCHES_PER_REPLICA * max(1, len(model.ready))), asyncio.Lock()
        large = len(branches) > LARGE_BRANCHES or sum(map(len, branches)) > LARGE_TOKENS

        async def compute(sub_batch: SubBatch) -> None:
            async with in_flight:
                if large:
                    async with building:
                        await asyncio.sleep(0)
                try:
                    scored = await self._ask(model, prompts, [branches[index] for index in sub_batch.indices], sub_batch, lease)
                except GatewayError as error:
                    fail(sub_batch.indices, error)
                else:
                    numbers = numbers_of(scored, prompts.readout, sub_batch.indices)
                    on_scored(numbers.indices, numbers.scored)
                    if numbers.spoilt:
                        fail(numbers.spoilt, overflow())

        def fail(indices: list[int], error: GatewayError) -> None:
            if on_error is None:
                raise error
            on_error(indices, error)

        if prompts.suffix and prompts.caller.keep_prefix and model.usable:
            sub_batches = await divide_items(model, prompts, branches)
        else:
            sub_batches = self._divide_evenly(model, prompts, branches)
        sub_batches = divided_by_images(sub_batches, prompts, branches, model.info.vision)
        self._telemetry.engines.sub_batches.observe(len(sub_batches))
        await all_or_cancel([compute(sub_batch) for sub_batch in sub_batches])

    def _divide_evenly(self, model: ServedModel, prompts: Prompts, branches: Sequence[Ids]) -> list[SubBatch]:
        """Divide the branches of one prefix into sub-batches of even size. The first one goes where the prefix is cached."""
        usable, prefix = model.usable, len(prompts.prefix)
        lengths = [len(branch) + len(prompts.suffix) for branch in branches]
        divided = split(
            prefix,
            lengths,
            self._split_tokens.parts(prefix, sum(lengths), replicas=len(usable), idle=sum(not each.tokens for each in usable)),
            max_branches=model.info.limits.max_branches,
            row_length=wire.row_length(prompts.readout, max(branches, key=len), model.info),
        )
        affinity = affinity_of(prompts.prefix, prompts.caller, model.adapter_digest)
        return [SubBatch(indices, affinity=None if number else affinity) for number, indices in enumerate(divided)]

    async def _ask(
        self, model: ServedModel, prompts: Prompts, branches: list[Ids], sub_batch: SubBatch, lease: Lease | None
    ) -> wire.Scored:
        """Send ``branches``, those of ``sub_batch``, to an engine, and return its answer."""
        request = message_of(prompts, branches, model.adapter_digest)
        row_lengths = [wire.row_length(prompts.readout, prompts.suffix or branch, model.info) for branch in branches]
        tokens = len(prompts.prefix) + sum(map(len, branches)) + len(prompts.suffix) * len(branches)

        async def ask(client: EngineClient, sent: wire.Score | wire.ScoreItems = request) -> wire.Scored:
            if lease is not None:
                lease.begin(sent.id, tokens=len(prompts.prefix) * (len(branches) - 1) + tokens, items=len(branches))
            scored = await client.score(sent)
            check_rows(scored.rows, row_lengths, prompts.readout, client.spoilt)
            return scored

        may = prompts.may_hedge and prompts.priority <= 0
        hedge = Hedge(size_class(request, tokens), lambda client: ask(client, without_keeping(request))) if may else None
        return await self._dispatcher.call(
            model, ask, tokens=tokens, affinity=sub_batch.affinity, preferred=sub_batch.replica, caller=prompts.caller, hedge=hedge
        )


async def all_or_cancel(runs: list[Coroutine[None, None, None]]) -> None:
    """Run all coroutines concurrently. On the first failure, or on cancellation, cancel the others and wait for them to end."""
    if len(runs) == 1:
        return await runs[0]
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
