"""Prefill-only requests: divided into sub-batches, sent to replicas, and their answers checked. All readouts come this way."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, cast

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import GatewayError, InternalError, NotANumber
from yardstick_llm.gateway.limits.limiter import Lease
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import Stage
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.hedging import Hedge, size_class
from yardstick_llm.gateway.pool.placement import affinity_of, assign, item_digests, parts_of, split
from yardstick_llm.gateway.pool.replica import Replica, ServedModel
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.text.prepared import Ids, ImageIds, PairIds

SUB_BATCHES_PER_REPLICA = 2
"""Sub-batches of one request in flight for each ready replica: one runs and one waits in the engine's queue, so that a large
request leaves room for others."""
LARGE_TOKENS, LARGE_BRANCHES = 1 << 15, 1 << 11
"""Tokens and branches of a request above which its messages are built and sent one by one, so that the event loop serves others in
between."""
MESSAGE_IMAGE_TOKENS = 1 << 12
"""Most image tokens of a message with several branches: with 2352 bytes each, encoding them takes the event loop some 4 ms."""
BRANCHES_IN_FLIGHT = 32
"""Branches of one request in flight at least for each ready encoder, where the messages are small."""
USUAL_SPARSE = 512
"""Numbers of a usual row of :class:`engine.wire.Sparse`, whose longest one has two for each token of the vocabulary."""

OnScored = Callable[[list[int], wire.Scored], None]
"""Receives the indices of the branches of a sub-batch, and the engine's answer."""

OnError = Callable[[list[int], GatewayError], None]
"""Receives the indices of the branches of a sub-batch that no engine could compute, and the last error."""


class Prompts(msgspec.Struct, frozen=True):
    """A tokenised prefill-only request: the prompts ``prefix + branch + suffix``, and what is read after each. Not more than one of
    ``prefix`` and ``suffix`` has tokens."""

    prefix: Ids
    branches: Sequence[Ids]
    readout: wire.ScoreReadout
    priority: int = 0
    caller: wire.Caller = wire.Caller()
    suffix: Ids = ()
    """Where it has tokens, each branch is an item whose tokens are worth keeping in the prefix cache of one replica."""
    images: Sequence[wire.Image] = ()
    """Images that the prompts name, each once; their tokens are in :class:`gateway.text.image_ids.ImageIds`."""
    expansion: int | None = None
    """Token to which no token attends at the end of a branch, see :attr:`engine.wire.TokenVectors.expansion_tokens`."""

    @property
    def lengths(self) -> list[int]:
        """Length of each prompt, in tokens."""
        shared = len(self.prefix) + len(self.suffix)
        return [shared + len(branch) for branch in self.branches]


class SubBatch(NamedTuple):
    """The branches of a request that one message carries."""

    indices: list[int]
    """The index of each branch in the request."""
    affinity: bytes | None = None
    """See :func:`gateway.pool.placement.affinity_of`."""
    replica: Replica | None = None
    """The replica that keeps its items."""


class FanOut:
    """Sends requests through ``dispatcher``, divided so that all replicas work."""

    def __init__(
        self, dispatcher: Dispatcher, telemetry: Telemetry, *, split_tokens: int, idle_split_tokens: int | None = None
    ) -> None:
        """``split_tokens``, ``idle_split_tokens``: least branch tokens of a sub-batch, and of one for a replica that computes
        nothing else; None means ``split_tokens``."""
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._usual, self._idle = split_tokens, idle_split_tokens or split_tokens

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
        large = len(branches) > LARGE_BRANCHES or sum(map(len, branches)) > LARGE_TOKENS

        async def compute(sub_batch: SubBatch) -> None:
            indices = sub_batch.indices
            async with in_flight:
                if large:
                    async with building:
                        await asyncio.sleep(0)
                try:
                    scored = await self._ask(model, prompts, [branches[index] for index in indices], sub_batch, lease)
                except GatewayError as error:
                    fail(indices, error)
                    return
                spoilt = spoilt_rows(scored.rows, prompts.readout)
                if not spoilt:
                    on_scored(indices, scored)
                    return
                kept = [place for place in range(len(indices)) if place not in spoilt]
                rows = [scored.rows[place] for place in kept]
                on_scored([indices[place] for place in kept], msgspec.structs.replace(scored, rows=rows))
                message = "The model's numbers overflow for this prompt; change it, or serve another --dtype."
                fail([indices[place] for place in sorted(spoilt)], NotANumber(message))

        def fail(indices: list[int], error: GatewayError) -> None:
            if on_error is None:
                raise error
            on_error(indices, error)

        if prompts.suffix and prompts.caller.keep_prefix and model.usable:
            sub_batches = await self._by_owner(model, prompts, branches)
        else:
            sub_batches = self._evenly(model, prompts, branches)
        sub_batches = divided_by_images(sub_batches, prompts, branches, model.info.vision)
        self._telemetry.engines.sub_batches.observe(len(sub_batches))
        messages = SUB_BATCHES_PER_REPLICA
        if model.info.encoder:  # whose pairs share a message only if their queries are equal
            messages = max(messages, BRANCHES_IN_FLIGHT * len(sub_batches) // max(1, len(branches)))
        in_flight, building = asyncio.Semaphore(messages * max(1, len(model.ready))), asyncio.Lock()
        await all_or_cancel([compute(sub_batch) for sub_batch in sub_batches])

    @staticmethod
    async def _by_owner(model: ServedModel, prompts: Prompts, branches: Sequence[Ids]) -> list[SubBatch]:
        """Divide items by the replicas that keep them in their prefix caches."""
        replicas, lengths = model.usable, [len(item) + len(prompts.suffix) for item in branches]
        digests = item_digests(branches, prompts.caller.cache_salt, model.adapter_digest)
        groups = await assign(replicas, digests, lengths)
        most, row = model.info.limits.max_branches, wire.row_length(prompts.readout, prompts.suffix, model.info)
        return [
            SubBatch([group[index] for index in few], replica=replica)
            for replica, group in zip(replicas, groups, strict=True)
            if group
            for few in split(0, [lengths[index] for index in group], 1, max_branches=most, row_length=row)
        ]

    def _evenly(self, model: ServedModel, prompts: Prompts, branches: Sequence[Ids]) -> list[SubBatch]:
        """Divide the branches of one prefix into sub-batches of even size. The first one goes where the prefix is cached. Branches
        that cannot share a message are kept apart."""
        # an encoder computes the prefix again for each branch
        usable, repeated = model.usable, len(prompts.prefix) if model.info.encoder else 0
        prefix, idle = len(prompts.prefix) - repeated, sum(not each.tokens for each in usable)
        affinity = None if repeated else affinity_of(prompts.prefix, prompts.caller, model.adapter_digest)
        groups: dict[object, Sequence[int]] = {None: range(len(branches))}
        if isinstance(branches[0], PairIds) or prompts.expansion is not None:
            apart: dict[object, list[int]] = {}
            for index, branch in enumerate(branches):
                shared = branch[: branch.seam].tobytes() if isinstance(branch, PairIds) else expansions(branch, prompts.expansion)
                apart.setdefault(shared, []).append(index)
            groups = dict(apart)
        sub_batches: list[SubBatch] = []
        for group in groups.values():
            lengths = [repeated + len(branches[index]) + len(prompts.suffix) for index in group]
            divided = split(
                prefix,
                lengths,
                parts_of(prefix, sum(lengths), usual=self._usual, idle=self._idle, replicas=len(usable), idle_replicas=idle),
                max_branches=model.info.limits.max_branches,
                row_length=usual_row(prompts.readout, max((branches[index] for index in group), key=len), model.info),
            )
            sub_batches += [SubBatch([group[place] for place in few]) for few in divided]
        return [sub_batches[0]._replace(affinity=affinity), *sub_batches[1:]]

    async def _ask(
        self, model: ServedModel, prompts: Prompts, branches: list[Ids], sub_batch: SubBatch, lease: Lease | None
    ) -> wire.Scored:
        """Send ``branches``, those of ``sub_batch``, to an engine, and return its answer."""
        if isinstance(branches[0], PairIds):
            seam = branches[0].seam
            prompts = msgspec.structs.replace(prompts, prefix=branches[0][:seam])
            branches = [branch[seam:] for branch in branches]
        if isinstance(prompts.readout, wire.TokenVectors) and (count := expansions(branches[0], prompts.expansion)):
            prompts = msgspec.structs.replace(prompts, readout=msgspec.structs.replace(prompts.readout, expansion_tokens=count))
        request = message_of(prompts, branches, model.adapter_digest)
        row_lengths = [wire.row_length(prompts.readout, prompts.suffix or branch, model.info) for branch in branches]
        tokens = len(prompts.prefix) + sum(map(len, branches)) + len(prompts.suffix) * len(branches)

        async def ask(replica: Replica, span: Stage | None, sent: wire.Score | wire.ScoreItems = request) -> wire.Scored:
            if lease is not None:
                lease.begin(sent.id, tokens=len(prompts.prefix) * (len(branches) - 1) + tokens, items=len(branches))
            scored = await replica.client.traced(span).score(sent)
            if not _complete(scored.rows, row_lengths, prompts.readout):
                raise InternalError("The engine's scores are incomplete; its model may be broken.", retryable=True)
            fault = replica.judge(spoilt=len(spoilt_rows(scored.rows, prompts.readout)) == len(scored.rows))
            if fault is not None:
                raise fault
            return scored

        async def ask_second(replica: Replica, span: Stage | None) -> wire.Scored:
            """The second replica does not keep items; the prefix of a :class:`wire.Score` is kept."""
            if isinstance(request, wire.Score):
                return await ask(replica, span)
            caller = msgspec.structs.replace(request.caller, keep_prefix=False)
            return await ask(replica, span, msgspec.structs.replace(request, caller=caller))

        hedge = Hedge(size_class(request, tokens), ask_second) if prompts.priority <= 0 else None
        return await self._dispatcher.call(
            model, ask, tokens=tokens, affinity=sub_batch.affinity, preferred=sub_batch.replica, caller=prompts.caller, hedge=hedge
        )


def message_of(prompts: Prompts, branches: list[Ids], adapter: str) -> wire.Score | wire.ScoreItems:
    """Return the message that computes ``branches``, with only the images that its prompts name."""
    id, readout, priority, caller = new_id(), prompts.readout, prompts.priority, prompts.caller
    prefix, suffix, rows, images = prompts.prefix, prompts.suffix, branches, list[wire.Image]()
    if prompts.images:
        (prefix, suffix, *rows), images = _renumbered([prefix, suffix, *branches], prompts.images)
    if not suffix:  # arrays stay arrays, which the encoder takes for lists
        shared, few = cast("list[int]", prefix), cast("list[list[int]]", rows)
        return wire.Score(id, shared, few, readout, priority, caller=caller, adapter=adapter, images=images)
    items, lengths = b"".join(map(wire.pack_ids, rows)), wire.pack_ids([len(item) for item in rows])
    return wire.ScoreItems(
        id,
        items,
        lengths,
        cast("list[int]", suffix),
        readout,
        priority,
        caller=caller,
        adapter=adapter,
        images=images,
    )


def divided_by_images(
    sub_batches: list[SubBatch], prompts: Prompts, branches: Sequence[Ids], vision: wire.VisionInfo | None
) -> list[SubBatch]:
    """Divide sub-batches further, so that none has more images than an engine takes in one message, and none with several branches
    more than :data:`MESSAGE_IMAGE_TOKENS`."""
    if vision is None or not prompts.images:
        return sub_batches
    tokens = [vision.tokens_of(image) for image in prompts.images]
    most = min(MESSAGE_IMAGE_TOKENS, vision.max_tokens or MESSAGE_IMAGE_TOKENS)
    shared = {*_places(prompts.prefix), *_places(prompts.suffix)}
    divided = []
    for sub_batch in sub_batches:
        few: list[int] = []
        used = shared
        for index in sub_batch.indices:
            wanted = used | {*_places(branches[index])}
            if few and (len(wanted) > vision.max_images or sum(tokens[image] for image in wanted) > most):
                divided.append(sub_batch._replace(indices=few))
                few, wanted = [], shared | {*_places(branches[index])}
            few.append(index)
            used = wanted
        divided.append(sub_batch._replace(indices=few))
    return divided


def _places(ids: Ids) -> Iterable[int]:
    return (span.place for span in ids.spans) if isinstance(ids, ImageIds) else ()


def _renumbered(parts: list[Ids], images: Sequence[wire.Image]) -> tuple[list[Ids], list[wire.Image]]:
    """Return ``parts`` with image tokens numbered by their first occurrence, and the images in this order."""
    numbers: dict[int, int] = {}
    for ids in parts:
        for place in _places(ids):
            numbers.setdefault(place, len(numbers))
    renumbered = list[Ids]()
    for ids in parts:
        if isinstance(ids, ImageIds) and any(numbers[span.place] != span.place for span in ids.spans):
            row = array("I", ids)
            for begin, end, place in ids.spans:
                row[begin:end] = array("I", [wire.IMAGE_TOKENS + numbers[place]]) * (end - begin)
            ids = row
        renumbered.append(ids)
    return renumbered, [images[place] for place in numbers]


def expansions(branch: Ids, token: int | None) -> int:
    """Return how often ``token`` stands at the end of ``branch``."""
    return 0 if token is None else sum(1 for _ in takewhile(token.__eq__, reversed(branch)))


def usual_row(readout: wire.ScoreReadout, branch: Ids, info: wire.Info) -> int:
    """Return the usual length of a row, from which messages are divided."""
    return USUAL_SPARSE if isinstance(readout, wire.Sparse) else wire.row_length(readout, branch, info)


def _complete(rows: list[list[float]], lengths: list[int], readout: wire.ScoreReadout) -> bool:
    """Whether an answer has all its numbers. A sparse row has pairs, in any number up to its length."""
    if not isinstance(readout, wire.Sparse):
        return list(map(len, rows)) == lengths
    return len(rows) == len(lengths) and all(
        len(row) % 2 == 0 and len(row) <= most for row, most in zip(rows, lengths, strict=True)
    )


def spoilt_rows(rows: list[list[float]], readout: wire.ScoreReadout) -> set[int]:
    """Places of rows that are not numbers. Minus infinity is valid as a log-probability only."""
    valid = not_nan if isinstance(readout, wire.Labels | wire.Likelihood) else math.isfinite
    sums = list(map(sum, rows))  # of finite numbers and minus infinity, one that is no number spoils the sum
    return set() if valid(sum(sums)) else {place for place, total in enumerate(sums) if not valid(total)}


def not_nan(number: float) -> bool:
    """Whether ``number`` is a number."""
    return not math.isnan(number)


async def all_or_cancel(runs: list[Coroutine[None, None, None]]) -> None:
    """Run all coroutines concurrently. On the first failure, or on cancellation, cancel the others and wait for them to end."""
    if len(runs) == 1:
        return await runs[0]
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)
