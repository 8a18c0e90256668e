"""Rows of many prompts. Each distinct prompt is looked up, awaited from another request, or computed, once."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import GatewayError, NotReady
from yardstick_llm.gateway.http.context import CachePolicy
from yardstick_llm.gateway.limits.limiter import Lease
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import stage
from yardstick_llm.gateway.pool.fanout import FanOut, Prompts, usual_row
from yardstick_llm.gateway.pool.placement import cut
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.store.base import Store
from yardstick_llm.gateway.text.prepared import PairIds, PlacedIds, content_of

HASHED_AT_ONCE = 256
"""Branches whose keys are computed between two looks at the clock."""
LOOKUP_KEYS = 1000
LOOKUP_NUMBERS = 1 << 15
"""Most keys, and about the most numbers of their rows, that are looked up or stored in one call; the event loop can serve other
requests between two calls."""

Row = tuple[float, ...]
"""The numbers that a readout gives for one prompt (:data:`engine.wire.ScoreReadout`)."""
Arrived = Callable[[list[tuple[int, Row]]], None]
"""Receives results as they become known: the index of a branch, and its row."""


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


class Scorer:
    """Computes rows with the cache and the engines, and shares results between concurrent requests of this process.

    Keys of the cache are digests of all inputs of a result (engine fingerprint, readout, tokens), so an entry never changes and is
    never invalidated. Rows are stored as float32, the precision of the engines; softmax is applied after the lookup.
    """

    def __init__(self, store: Store, fan_out: FanOut, telemetry: Telemetry) -> None:
        self._store = store
        self._fan_out = fan_out
        self._telemetry = telemetry
        self._flights: dict[bytes, asyncio.Future[Mapping[bytes, Row]]] = {}
        """Single flight: the result of a key that some request computes. One future serves all keys that a request computes,
        because creating ten thousand futures takes 10 ms. Keys that failed are missing in its result; who waited for them computes
        them."""

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
        keys: list[bytes] = []
        time_slice, fingerprint, salt = TimeSlice(), model.info.fingerprint, prompts.caller.cache_salt
        if prompts.expansion is not None:  # the preset's, which the fingerprint does not cover
            fingerprint = f"{fingerprint} {prompts.expansion}"
        for begin in range(0, len(prompts.branches), HASHED_AT_ONCE):
            few = prompts.branches[begin : begin + HASHED_AT_ONCE]
            keys += result_keys(
                fingerprint, prompts.readout, prompts.prefix, few, prompts.suffix, salt=salt, pairs=model.info.encoder
            )
            if time_slice.over:
                await time_slice.yield_to_loop()
        branch_of = dict(zip(keys, prompts.branches, strict=True))
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(keys) if arrived is not None else ():
            places.setdefault(key, []).append(place)
        results: dict[bytes, Row] = {}
        errors: dict[bytes, GatewayError] = {}
        hits: set[bytes] = set()
        cached_tokens, queue_seconds = 0, 0.0
        numbers = usual_row(prompts.readout, max(prompts.branches, key=len, default=()), model.info)
        at_once = max(1, min(LOOKUP_KEYS, LOOKUP_NUMBERS // max(1, numbers)))

        def add(found: Mapping[bytes, Row]) -> None:
            results.update(found)
            if arrived is not None and found:
                arrived([(place, row) for key, row in found.items() for place in places[key]])

        async def look_up(keys: list[bytes]) -> None:
            for few in cut(keys, at_once) if policy.read else ():
                found = await self._look_up(few, model.name)
                add(found)
                hits.update(found)
                if len(few) < len(keys):
                    await asyncio.sleep(0)

        async def compute(keys: list[bytes]) -> None:
            def take(indices: list[int], scored: wire.Scored) -> None:
                nonlocal cached_tokens, queue_seconds
                add(dict(zip([keys[index] for index in indices], map(tuple, scored.rows), strict=True)))
                cached_tokens += scored.cached_tokens
                queue_seconds = max(queue_seconds, scored.queue_seconds)

            def fail(indices: list[int], error: GatewayError) -> None:
                errors.update({keys[index]: error for index in indices})

            branches = [branch_of[key] for key in keys]
            await self._fan_out.run(model, prompts, branches, take, lease, on_error=fail if partial else None)

        await look_up(list(branch_of))
        while missing := [key for key in branch_of if key not in results and key not in errors]:
            # no await until begin(), or two requests may compute the same key
            flights = {key: self._flights[key] for key in missing if key in self._flights} if policy.read else {}
            own = [key for key in missing if key not in flights]
            flight = self._begin(own) if policy.read else None
            try:
                if own:
                    await compute(own)
            except NotReady:  # the cache may have been late before, and others may have stored results meanwhile
                await look_up([key for key in missing if key not in results])
                if all(key in results for key in missing):
                    break
                raise
            finally:
                if flight is not None:
                    for key in own:
                        del self._flights[key]
                    flight.set_result(results)
                if policy.write:
                    for few in cut([key for key in own if key in results], at_once):
                        # float32 in the machine's byte order, which the tokens in the key have too
                        await self._store.cache({key: array("f", results[key]).tobytes() for key in few})
                        if len(few) < len(own):
                            await asyncio.sleep(0)
            if flights:
                with stage("gateway.shared"):
                    await asyncio.wait(set(flights.values()))
                theirs = {key: row for key, each in flights.items() if (row := each.result().get(key)) is not None}
                add(theirs)
                hits.update(theirs)
        if errors and not results:
            raise next(iter(errors.values()))
        reused = [key in hits for key in keys]
        cached_tokens += sum(length for hit, length in zip(reused, prompts.lengths, strict=True) if hit)
        return Scores(
            [results.get(key, ()) for key in keys],
            reused,
            cached_tokens,
            queue_seconds,
            set() if len(branch_of) == len(keys) else _repeated(keys),
            {place: errors[key] for place, key in enumerate(keys) if key in errors} if errors else {},
        )

    def _begin(self, keys: Iterable[bytes]) -> asyncio.Future[Mapping[bytes, Row]]:
        """Announce that ``keys`` are being computed."""
        flight: asyncio.Future[Mapping[bytes, Row]] = asyncio.get_running_loop().create_future()
        self._flights |= dict.fromkeys(keys, flight)
        return flight

    async def _look_up(self, keys: list[bytes], model: str) -> dict[bytes, Row]:
        """Return the results of ``keys`` that the cache has."""
        began = time.perf_counter()
        with stage("gateway.cache") as lookup:
            values = zip(keys, await self._store.cached(keys), strict=True)
            found = {key: tuple(array("f", value)) for key, value in values if value and len(value) % 4 == 0}
            misses = len(keys) - len(found)
            if lookup is not None:
                lookup.attributes |= {"yardstick.cache.hits": len(found), "yardstick.cache.misses": misses}
        self._telemetry.looked_up(model, len(found), misses, time.perf_counter() - began)
        return found


def _repeated(keys: list[bytes]) -> set[int]:
    """Places of the keys that are equal to one before them."""
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    return {place for place, key in enumerate(keys) if first[key] != place}


def result_keys(
    fingerprint: str,
    readout: wire.ScoreReadout,
    prefix: Sequence[int],
    branches: Sequence[Sequence[int]],
    suffix: Sequence[int] = (),
    *,
    salt: str,
    pairs: bool = False,
) -> list[bytes]:
    """Return the cache key of each ``prefix + branch + suffix``, a digest of 16 bytes. Likelihoods go without a suffix. ``pairs``:
    prefix and branch are a pair for an encoder.

    Within one salt, equal prompts, readouts and fingerprints have equal keys, wherever a prompt is divided into prefix, branch and
    suffix. Likelihoods are an exception, because the division says which tokens they are of, and so are pairs, and registered
    items, whose digests are hashed in place of their tokens: they share no results with prompts that are given whole.

    Token ids are in [0, 2**32); an image counts as its digest. ``salt`` is hexadecimal; only requests with equal salts share
    results. An empty salt gives the keys of a server whose API keys share all results.
    """
    registered = bool(branches) and isinstance(branches[0], PlacedIds)
    common = hashlib.blake2b(digest_size=16, person=b"registered" if registered else b"")
    # The encoding is unambiguous: no part contains a separator, a salt ends with a colon, and JSON begins with a brace.
    tokens = readout.tokens if isinstance(readout, wire.Labels) and not readout.raw else None
    asked = msgspec.json.encode(readout).decode() if tokens is None else ",".join(map(str, tokens))
    apart = bool(branches) and isinstance(branches[0], PairIds)  # each has its own seam
    divided = f"{len(prefix)}\0" if isinstance(readout, wire.Likelihood) or (pairs and not apart) else ""
    common.update(f"{fingerprint}\0{salt and salt + ':'}{asked}\0{divided}".encode())
    common.update(content_of(prefix))
    end = content_of(suffix)
    keys = []
    for branch in branches:
        digest = common.copy()
        digest.update(content_of(branch))
        digest.update(end)
        keys.append(digest.digest())
    return keys
