"""The common part of the endpoints that score prompts without decoding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request

from engine import wire
from gateway.admission.quotas import Quotas
from gateway.cache.base import Row
from gateway.cache.policy import CachePolicy
from gateway.errors import InvalidRequest
from gateway.handling.access import caller_of
from gateway.handling.streams import DONE, EventStream, Streams, sse, while_connected
from gateway.http.context import RequestContext
from gateway.ops.metrics import Telemetry
from gateway.pool.fanout import Prompts
from gateway.pool.placement import cut
from gateway.pool.replica import ServedModel, check_fallback, paths_of
from gateway.presets.preset import Fitted, Task
from gateway.process.time_slices import TimeSlice
from gateway.schemas.truncation import ItemError
from gateway.schemas.usage import ItemUsage
from gateway.scoring.scorer import Arrived, Scorer, Scores
from gateway.text.prepared import Prepared

RESULTS_PER_EVENT = 200
NUMBERS_PER_EVENT = 1 << 12
"""Most results of one event, and most numbers of several; building it takes about a millisecond."""
NEEDS: dict[str, str] = {"rerank": "a reranker", "classify": "a classifier", "embed": "an embedding model"}


@dataclass(frozen=True, kw_only=True)
class ScoringJob:
    """A request whose prompts are ready to be scored."""

    request: Request[Any, Any, Any]
    model: ServedModel
    prepared: Prepared
    readout: wire.ScoreReadout
    priority: int
    cache_salt: str | None
    partial: bool = False
    """Whether items without a result are accepted."""


@dataclass(frozen=True)
class Scoring:
    """Charges a request, scores its prompts, and accounts for it."""

    scorer: Scorer
    quotas: Quotas
    telemetry: Telemetry
    streams: Streams

    async def score(self, job: ScoringJob) -> Scores:
        """Return the rows of the job's readout. Raises :class:`GatewayError`."""
        async with while_connected(job.request.scope):
            return await self._score(job)

    async def stream(
        self,
        job: ScoringJob,
        chunk: Callable[[list[tuple[int, Row]]], msgspec.Struct],
        closing: Callable[[Scores], Awaitable[bytes]],
    ) -> EventStream:
        """Return a response that sends each result as soon as it is known. ``chunk`` builds an event from the indices of items and
        their rows, ``closing`` encodes the last event before ``[DONE]``. Raises :class:`GatewayError` for failures before the first
        one."""
        queue: asyncio.Queue[list[tuple[int, Row]] | None] = asyncio.Queue()
        places = job.prepared.places

        def arrived(results: list[tuple[int, Row]]) -> None:
            queue.put_nowait([(places[index], row) for index, row in results])

        async def events() -> AsyncGenerator[bytes, None]:
            work = asyncio.create_task(self._score(job, arrived))
            work.add_done_callback(lambda _: queue.put_nowait(None))
            time_slice = TimeSlice()  # an event that can be written at once is no pause
            try:
                while (results := await queue.get()) is not None:
                    for few in cut(results, per_event([row for _, row in results])):
                        yield sse(chunk(few))
                        if time_slice.over:
                            await time_slice.yield_to_loop()
                yield await closing(await work)
                yield DONE
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

        return self.streams.response(events(), job.request)

    async def _score(self, job: ScoringJob, arrived: Arrived | None = None) -> Scores:
        prepared = job.prepared
        caller = caller_of(job.request, cache_salt=job.cache_salt)
        prompts = Prompts(
            prepared.prefix, prepared.rows, job.readout, job.priority, caller, prepared.suffix, images=prepared.images
        )
        account = RequestContext.of(job.request).account
        account.prompt_tokens, account.items = prepared.tokens, len(prepared.rows)
        lease = await self.quotas.charge(job.request, tokens=account.prompt_tokens, items=account.items)
        policy = CachePolicy.of(job.request)
        scores = await self.scorer.score(job.model, prompts, policy, lease, arrived=arrived, partial=job.partial)
        account.cache_hits, account.cached_tokens, account.queue_seconds = scores.hits, scores.cached_tokens, scores.queue_seconds
        if prepared.suffix:
            self.telemetry.catalogues.scored(account.model, prepared.tokens, scores.cached_tokens)
        if isinstance(job.readout, wire.LengthValue):
            self.telemetry.valued(account)
        else:
            self.telemetry.scored(account)
        return scores


def per_event(rows: Iterable[Row]) -> int:
    """Return the most results of one event with ``rows``, of which there is at least one."""
    return max(1, min(RESULTS_PER_EVENT, NUMBERS_PER_EVENT // max(1, max(map(len, rows)))))


def headers_of(prepared: Prepared, scores: Scores) -> dict[str, str]:
    """Return the response headers that tell how many results were reused, and how many texts were cut."""
    headers = {"x-yardstick-cache": f"{scores.hits}/{len(scores.rows)}"}
    if prepared.truncated or prepared.query_truncated:
        query = ", query" if prepared.query_truncated else ""
        headers["x-yardstick-truncated"] = f"{len(prepared.truncated)}{query}"
    return headers


def item_usage_of(prepared: Prepared, scores: Scores, *, asked: bool | None) -> ItemUsage | msgspec.UnsetType:
    """Return the usage of each item that has a result, if it is ``asked`` for. Takes some milliseconds for the most items."""
    if not asked:
        return msgspec.UNSET
    known = [place for place, row in enumerate(scores.rows) if row]
    items, lengths, free = prepared.places, [*map(len, prepared.rows)], scores.repeated
    shared = len(prepared.prefix)
    return ItemUsage(
        index=[items[place] for place in known],
        prompt_tokens=[shared + lengths[place] for place in known],
        computed_tokens=[0 if scores.reused[place] or place in free else lengths[place] for place in known],
        reused=[scores.reused[place] for place in known],
    )


def errors_of(prepared: Prepared, scores: Scores) -> list[ItemError]:
    """Return the errors of a request's items: those that were not sent to engines, and those that engines could not compute."""
    refused = [
        ItemError(index=each.index, message=each.message, type=InvalidRequest.type, code=each.code) for each in prepared.refused
    ]
    places = prepared.places
    failed = [
        ItemError(index=places[row], message=error.message, type=error.type, code=error.code)
        for row, error in scores.errors.items()
    ]
    return sorted([*refused, *failed], key=lambda error: error.index)


def fitted_of(request: Request[Any, Any, Any], model: ServedModel, task: Task) -> Fitted:
    """Return the preset of ``model`` for ``task``; a header of the response names one that is a fallback. Raises
    :class:`InvalidRequest` that says what the model can do."""
    fitted = model.tokenizer.table.fitted
    if fitted is not None and fitted.serves(task):
        check_fallback(fitted, model, task)
        if model.preset_is_fallback:
            RequestContext.of(request).headers.append((b"x-yardstick-preset-fallback", fitted.preset.name.encode()))
        return fitted
    raise InvalidRequest(f"The model {model.name!r} is not {NEEDS[task]}; it serves {paths_of(model)}.", param="model")
