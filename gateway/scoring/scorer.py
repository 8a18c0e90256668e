"""Rows of many prompts. Each distinct prompt is looked up, awaited from another request, or computed, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine import wire
from gateway.cache.base import ResultCache, Row
from gateway.cache.flights import Flights
from gateway.cache.policy import CachePolicy
from gateway.errors import GatewayError, NotReady
from gateway.limits.base import Lease
from gateway.pool.fanout import FanOut
from gateway.pool.prompts import Prompts
from gateway.pool.replica import ServedModel
from gateway.pool.split import cut
from gateway.process.time_slices import pause_if, slices
from gateway.scoring.keys import result_keys
from gateway.text.prepared import Ids

LOOKUP_KEYS = 1000
LOOKUP_NUMBERS = 1 << 15
"""Most keys, and about the most numbers of their rows, that are looked up or stored in one call; the event loop can serve other
requests between two calls."""


class Scores(msgspec.Struct, frozen=True):
    """Results of a score request, and how they were obtained."""

    rows: list[Row]
    """[branch][number], as the readout says."""
    reused: list[bool]
    """For each branch, whether its result was in the cache or already being computed for another request."""
    cached_tokens: int
    """Prompt tokens of the hits, plus tokens of other prompts that engines found in their prefix caches."""
    queue_seconds: float = 0.0
    """Longest time that a sub-batch of the request waited in an engine's queue."""
    repeated: set[int] = set()
    """Branches that are equal to one before them, and were not computed again."""
    errors: dict[int, GatewayError] = {}
    """Branches that could not be computed, in a request that accepts partial results. Their rows are empty."""

    @property
    def hits(self) -> int:
        """Number of branches whose result was reused."""
        return sum(self.reused)


Arrived = Callable[[list[tuple[int, Row]]], None]
"""Receives results as they become known: the index of a branch, and its row."""


@dataclass(slots=True)
class _Job:
    """State of one request in progress."""

    model: ServedModel
    prompts: Prompts
    policy: CachePolicy
    lease: Lease | None
    arrived: Arrived | None = None
    partial: bool = False
    results: dict[bytes, Row] = field(default_factory=dict)
    errors: dict[bytes, GatewayError] = field(default_factory=dict)
    places: dict[bytes, list[int]] = field(default_factory=dict)
    """Indices of the branches of each key; empty unless results are passed on as they arrive."""
    cached_tokens: int = 0
    queue_seconds: float = 0.0

    lookup_keys: int = field(init=False)
    """Most keys that are looked up or stored in one call."""

    def __post_init__(self) -> None:
        longest = max(self.prompts.branches, key=len, default=())
        numbers = wire.row_length(self.prompts.readout, longest, self.model.info)
        self.lookup_keys = max(1, min(LOOKUP_KEYS, LOOKUP_NUMBERS // max(1, numbers)))

    def take(self, keys: list[bytes], scored: wire.Scored) -> None:
        """Add an engine's results for ``keys``."""
        self.add(dict(zip(keys, map(tuple, scored.rows), strict=True)))
        self.cached_tokens += scored.cached_tokens
        self.queue_seconds = max(self.queue_seconds, scored.queue_seconds)

    def fail(self, keys: list[bytes], error: GatewayError) -> None:
        """Note that ``keys`` could not be computed."""
        self.errors |= dict.fromkeys(keys, error)

    def add(self, results: dict[bytes, Row]) -> None:
        """Add results and pass them on."""
        self.results |= results
        if self.arrived is not None and results:
            self.arrived([(place, row) for key, row in results.items() for place in self.places[key]])


class Scorer:
    """Computes rows with ``cache`` and the engines, and shares results between concurrent requests of this process."""

    def __init__(self, cache: ResultCache, fan_out: FanOut) -> None:
        self._cache = cache
        self._fan_out = fan_out
        self._flights = Flights()

    async def score(
        self,
        model: ServedModel,
        prompts: Prompts,
        policy: CachePolicy,
        lease: Lease | None = None,
        *,
        arrived: Arrived | None = None,
        partial: bool = False,
    ) -> Scores:
        """Return the scores and record the messages to engines in ``lease``. Results are also passed to ``arrived`` at once.

        Raises :class:`GatewayError` if an engine fails; the results computed before that are kept in the cache. With ``partial``,
        it is raised only if no branch has a result.
        """
        job = _Job(model, prompts, policy, lease, arrived, partial)
        salt = prompts.caller.cache_salt
        keys: list[bytes] = []
        for begin, end in slices(prompts.branches):
            branches = prompts.branches[begin:end]
            keys += result_keys(model.info.fingerprint, prompts.readout, prompts.prefix, branches, prompts.suffix, salt=salt)
            await pause_if(end > LOOKUP_KEYS or end < len(prompts.branches))  # also between slices of few long branches
        branch_of = dict(zip(keys, prompts.branches, strict=True))
        if arrived is not None:
            for place, key in enumerate(keys):
                job.places.setdefault(key, []).append(place)
        results = job.results
        hits = await self._look_up(job, list(branch_of))
        while missing := [key for key in branch_of if key not in results and key not in job.errors]:
            flights = self._flights.find(missing) if policy.read else {}
            try:
                await self._compute(job, {key: branch_of[key] for key in missing if key not in flights})
            except NotReady:  # the cache may have been late before, and others may have stored results meanwhile
                hits |= await self._look_up(job, [key for key in missing if key not in results])
                if all(key in results for key in missing):
                    break
                raise
            job.add(theirs := await self._flights.wait(flights))
            hits |= set(theirs)
        if job.errors and not results:
            raise next(iter(job.errors.values()))
        await pause_if(len(keys) > LOOKUP_KEYS)
        reused = [key in hits for key in keys]
        cached_tokens = job.cached_tokens + sum(length for hit, length in zip(reused, prompts.lengths, strict=True) if hit)
        repeated = set() if len(branch_of) == len(keys) else _repeated(keys)
        await pause_if(len(keys) > LOOKUP_KEYS)
        errors = {place: job.errors[key] for place, key in enumerate(keys) if key in job.errors} if job.errors else {}
        return Scores([results.get(key, ()) for key in keys], reused, cached_tokens, job.queue_seconds, repeated, errors)

    async def _look_up(self, job: _Job, keys: list[bytes]) -> set[bytes]:
        """Add the results of ``keys`` that the cache has, and return their keys."""
        hits: set[bytes] = set()
        for asked in cut(keys, job.lookup_keys) if job.policy.read else ():
            found = await self._cache.get_many(asked, job.model.name)
            job.add(results := {key: result for key, result in zip(asked, found, strict=True) if result is not None})
            hits |= results.keys()
            await pause_if(len(keys) > job.lookup_keys)
        return hits

    async def _compute(self, job: _Job, branch_of: dict[bytes, Ids]) -> None:
        """Compute ``branch_of`` on engines, add the results to ``job``, and publish them to waiting requests and the cache."""
        if not branch_of:
            return
        keys = list(branch_of)

        def take(indices: list[int], scored: wire.Scored) -> None:
            job.take([keys[index] for index in indices], scored)

        def fail(indices: list[int], error: GatewayError) -> None:
            job.fail([keys[index] for index in indices], error)

        if job.policy.read:
            self._flights.begin(branch_of)  # no await between find() and begin(), or two requests may compute the same key
        try:
            await pause_if(len(branch_of) > LOOKUP_KEYS)
            branches = list(branch_of.values())
            await self._fan_out.run(job.model, job.prompts, branches, take, job.lease, on_error=fail if job.partial else None)
        finally:
            if job.policy.read:
                self._flights.end(branch_of, job.results)
            if job.policy.write:
                for kept in cut([key for key in branch_of if key in job.results], job.lookup_keys):
                    await self._cache.put_many({key: job.results[key] for key in kept})
                    await pause_if(len(branch_of) > job.lookup_keys)


def _repeated(keys: list[bytes]) -> set[int]:
    """Places of the keys that are equal to one before them."""
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    return {place for place, key in enumerate(keys) if first[key] != place}
