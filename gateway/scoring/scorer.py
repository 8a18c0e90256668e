"""Label log-probabilities of many prompts. Each distinct prompt is looked up, awaited from another request, or computed, once."""

from __future__ import annotations

import asyncio
import hashlib
import math
import uuid
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine import wire
from gateway.breathing import slices
from gateway.cache.base import Logprobs, ResultCache
from gateway.cache.flights import Flights
from gateway.cache.policy import CachePolicy
from gateway.errors import InternalError
from gateway.limits.base import Lease
from gateway.pool.client import EngineClient
from gateway.pool.dispatch import Dispatcher
from gateway.pool.replica import ServedModel
from gateway.scoring.keys import result_keys
from gateway.scoring.split import cut, split
from gateway.telemetry import Telemetry
from gateway.text.prepared import Ids, as_list

SUB_BATCHES_PER_REPLICA = 2
"""Sub-batches of one request in flight for each ready replica: one runs and one waits in the engine's queue, so that a large
request leaves room for others."""

LOOKUP_KEYS = 1000
"""Keys that are looked up or stored in one call; the event loop can serve other requests between two calls."""

T = TypeVar("T")

MIN_AFFINITY = 16
"""Shortest prefix, in tokens, for which a request prefers a replica; recomputing a shorter one costs almost nothing."""


class Prompts(msgspec.Struct, frozen=True):
    """A tokenised score request."""

    prefix: Ids
    branches: Sequence[Ids]
    labels: list[int]
    priority: int = 0
    caller: wire.Caller = wire.Caller()

    @property
    def lengths(self) -> list[int]:
        """Length of each prompt, in tokens."""
        return [len(self.prefix) + len(branch) for branch in self.branches]


class Scores(msgspec.Struct, frozen=True):
    """Results of a score request, and how they were obtained."""

    logprobs: list[Logprobs]
    """[branch][label]"""
    hits: int
    """Branches whose result was in the cache or already being computed for another request."""
    cached_tokens: int
    """Prompt tokens of the hits, plus tokens of other prompts that engines found in their prefix caches."""
    queue_seconds: float = 0.0
    """Longest time that a sub-batch of the request waited in an engine's queue."""


@dataclass(slots=True)
class _Job:
    """State of one request in progress."""

    model: ServedModel
    prompts: Prompts
    policy: CachePolicy
    lease: Lease | None
    results: dict[bytes, Logprobs] = field(default_factory=dict)
    cached_tokens: int = 0
    queue_seconds: float = 0.0

    def take(self, keys: list[bytes], scored: wire.Scored) -> None:
        """Add an engine's results for ``keys``."""
        self.results.update(zip(keys, map(tuple, scored.logprobs), strict=True))
        self.cached_tokens += scored.cached_tokens
        self.queue_seconds = max(self.queue_seconds, scored.queue_seconds)


class Scorer:
    """Computes scores with ``cache`` and the engines, and shares results between concurrent requests of this process."""

    def __init__(self, cache: ResultCache, dispatcher: Dispatcher, telemetry: Telemetry, *, split_tokens: int) -> None:
        """``split_tokens``: see :func:`gateway.scoring.split.split`."""
        self._cache = cache
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._split_tokens = split_tokens
        self._flights = Flights()

    async def score(self, model: ServedModel, prompts: Prompts, policy: CachePolicy, lease: Lease | None = None) -> Scores:
        """Return the scores and record the messages to engines in ``lease``. Raises :class:`GatewayError` if an engine fails; the
        results computed before that are kept in the cache."""
        job = _Job(model, prompts, policy, lease)
        salt = prompts.caller.cache_salt
        keys: list[bytes] = []
        for begin, end in slices(prompts.branches):
            keys += result_keys(model.info.fingerprint, prompts.labels, prompts.prefix, prompts.branches[begin:end], salt=salt)
            if end > LOOKUP_KEYS:
                await asyncio.sleep(0)
        branch_of = dict(zip(keys, prompts.branches, strict=True))
        if policy.read:
            for asked in cut(list(branch_of), LOOKUP_KEYS):
                found = await self._cache.get_many(asked)
                job.results |= {key: result for key, result in zip(asked, found, strict=True) if result is not None}
                if len(branch_of) > LOOKUP_KEYS:
                    await asyncio.sleep(0)
        results = job.results
        hits = set(results)
        while missing := [key for key in branch_of if key not in results]:
            flights = self._flights.find(missing) if policy.read else {}
            await self._compute(job, {key: branch_of[key] for key in missing if key not in flights})
            results |= (theirs := await self._flights.wait(flights))
            hits |= set(theirs)
        if len(keys) > LOOKUP_KEYS:
            await asyncio.sleep(0)
        cached_tokens = job.cached_tokens + sum(length for key, length in zip(keys, prompts.lengths, strict=True) if key in hits)
        return Scores([results[key] for key in keys], sum(key in hits for key in keys), cached_tokens, job.queue_seconds)

    async def _compute(self, job: _Job, branch_of: dict[bytes, Ids]) -> None:
        """Compute ``branch_of`` on engines, add the results to ``job``, and publish them to waiting requests and the cache."""
        if not branch_of:
            return
        gate = asyncio.Semaphore(SUB_BATCHES_PER_REPLICA * max(1, len(job.model.ready)))

        async def run(keys: list[bytes], affinity: bytes | None) -> None:
            async with gate:
                job.take(keys, await self._ask(job, [branch_of[key] for key in keys], affinity))

        if job.policy.read:
            self._flights.begin(branch_of)  # no await between find() and begin(), or two requests may compute the same key
        try:
            if len(branch_of) > LOOKUP_KEYS:
                await asyncio.sleep(0)
            parts = self._split(job, branch_of)
            first = affinity_of(job.prompts.prefix, job.prompts.caller)
            await all_or_cancel([run(keys, None if place else first) for place, keys in enumerate(parts)])
        finally:
            if job.policy.read:
                self._flights.end(branch_of, job.results)
            if job.policy.write:
                for kept in cut([key for key in branch_of if key in job.results], LOOKUP_KEYS):
                    await self._cache.put_many({key: job.results[key] for key in kept})
                    if len(branch_of) > LOOKUP_KEYS:
                        await asyncio.sleep(0)

    def _split(self, job: _Job, branch_of: dict[bytes, Ids]) -> list[list[bytes]]:
        """Return the keys of each sub-batch."""
        keys = list(branch_of)
        parts = split(
            len(job.prompts.prefix),
            [len(branch) for branch in branch_of.values()],
            replicas=len(job.model.usable),
            split_tokens=self._split_tokens,
            max_branches=job.model.info.limits.max_branches,
            labels=len(job.prompts.labels),
        )
        self._telemetry.split(len(parts))
        return [[keys[place] for place in part] for part in parts]

    async def _ask(self, job: _Job, branches: list[Ids], affinity: bytes | None) -> wire.Scored:
        prompts, lease = job.prompts, job.lease
        prefix, rows = as_list(prompts.prefix), [as_list(branch) for branch in branches]
        request = wire.Score(uuid.uuid4().hex, prefix, rows, prompts.labels, prompts.priority, caller=prompts.caller)
        tokens = len(prefix) + sum(map(len, rows))

        async def ask(client: EngineClient) -> wire.Scored:
            if lease is not None:
                lease.begin(request.id, tokens=len(prompts.prefix) * (len(branches) - 1) + tokens, items=len(branches))
            scored = await client.score(request)
            shape = [len(row) for row in scored.logprobs]
            if shape != [len(prompts.labels)] * len(branches) or any(math.isnan(sum(row)) for row in scored.logprobs):
                message = "The engine's scores are incomplete or not numbers; its model may be broken."
                raise InternalError(message, retryable=True)
            return scored

        return await self._dispatcher.call(job.model, ask, tokens=tokens, affinity=affinity, caller=prompts.caller)


def affinity_of(prefix: Ids, caller: wire.Caller) -> bytes | None:
    """Return a digest of the prefix, by which requests with equal prefixes reach the same replica. None for a request that does not
    use prefix caches or whose prefix is shorter than :data:`MIN_AFFINITY`."""
    if len(prefix) < MIN_AFFINITY or not caller.keep_prefix:
        return None
    return hashlib.blake2b(array("I", prefix), digest_size=16, key=caller.cache_salt.encode()).digest()


async def all_or_cancel(runs: list[Coroutine[None, None, T]]) -> list[T]:
    """Run all coroutines concurrently. On the first failure, or on cancellation, cancel the others and wait for them to end."""
    if len(runs) == 1:
        return [await runs[0]]
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
