"""Shared by the endpoints that score: running a request, and the forms of its answer."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.access import Quotas, caller_of, priority_of
from yardstick_llm.gateway.api.answers import DONE, EventStream, sse, while_connected
from yardstick_llm.gateway.api.reader import Reading
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.sequence import LEAST_LOGPROB
from yardstick_llm.gateway.http.context import AnyRequest, CachePolicy, RequestContext
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.fanout import Prompts
from yardstick_llm.gateway.pool.placement import cut
from yardstick_llm.gateway.pool.replica import ServedModel, check_fallback, paths_of
from yardstick_llm.gateway.presets.preset import Fitted, Task, softmax
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.requests.score import (
    ItemLikelihood,
    ItemScores,
    LikelihoodChunk,
    Likelihoods,
    PairChunk,
    PairScore,
    PairScores,
    ScoreChunk,
    ScoreRequest,
    ScoreResponse,
)
from yardstick_llm.gateway.schemas.common import NAMES_OF_VLLM, ItemError, ItemUsage, ModelRequest, Usage, usage_of_prompts
from yardstick_llm.gateway.scoring.scorer import Arrived, Row, Scorer, Scores
from yardstick_llm.gateway.scoring.similarity import max_similarity, similarity, vectors_of
from yardstick_llm.gateway.text.prepared import Prepared

RESULTS_PER_EVENT = 200
NUMBERS_PER_EVENT = 1 << 12
"""Most results of one event, and most numbers of several; building it takes about a millisecond."""
MAX_NUMBERS = 1 << 22
"""Most numbers of the embeddings that one request compares or is answered, such as 1,024 embeddings of 4,096; the gateway holds
them all, in about 130 MiB."""
NEEDS: dict[str, str] = {"rerank": "a reranker", "classify": "a classifier", "embed": "an embedding model"}


@dataclass(frozen=True)
class ScoringJob:
    """A request whose prompts are ready to be scored."""

    body: Reading[Any]
    model: ServedModel
    prepared: Prepared
    readout: wire.ScoreReadout
    partial: bool = False
    """Whether items without a result are accepted."""

    @property
    def request(self) -> AnyRequest:
        """The client's request."""
        return self.body.request


@dataclass(frozen=True)
class Scoring:
    """Charges a request, scores its prompts, and accounts for it."""

    scorer: Scorer
    quotas: Quotas
    telemetry: Telemetry
    keepalive_seconds: float

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

        return EventStream(events(), job.request, self.keepalive_seconds)

    async def _score(self, job: ScoringJob, arrived: Arrived | None = None) -> Scores:
        prepared = job.prepared
        fields: ModelRequest = job.body.fields
        caller, priority = caller_of(job.request, cache_salt=fields.cache_salt), priority_of(job.request, fields.priority)
        readout = job.readout
        if prepared.prompt_tokens and isinstance(readout, wire.Embedding):
            readout = msgspec.structs.replace(readout, prompt_tokens=prepared.prompt_tokens)
        fitted = job.model.tokenizer.table.fitted
        expansion = fitted.expansion if fitted is not None and isinstance(readout, wire.TokenVectors) else None
        prompts = Prompts(prepared.prefix, prepared.rows, readout, priority, caller, prepared.suffix, prepared.images, expansion)
        account = RequestContext.of(job.request).account
        account.prompt_tokens, account.items = prepared.tokens, len(prepared.rows)
        lease = await self.quotas.charge(job.request, tokens=account.prompt_tokens, items=account.items)
        policy = CachePolicy.of(job.request)
        compares = prepared.queries > 0
        numbers = sum(wire.row_length(job.readout, row, job.model.info) for row in prepared.rows) if compares else 0
        if numbers > MAX_NUMBERS:
            message = f"The embeddings have {numbers} numbers; at most {MAX_NUMBERS} are compared at once. Send several requests."
            raise InvalidRequest(message, param=prepared.param.removesuffix("[]"))
        scores = await self.scorer.score(
            job.model, prompts, policy, lease, arrived=None if compares else arrived, partial=job.partial
        )
        if compares:
            scores = await compared(job.model, prepared, scores, job.readout)
            if arrived is not None:
                arrived([*enumerate(scores.rows)])
        account.cache_hits, account.cached_tokens, account.queue_seconds = scores.hits, scores.cached_tokens, scores.queue_seconds
        if prepared.suffix:
            self.telemetry.catalogues.scored(account.model, prepared.tokens, scores.cached_tokens)
        if isinstance(job.readout, wire.LengthValue):
            self.telemetry.valued(account)
        else:
            self.telemetry.scored(account)
        return scores


async def compared(model: ServedModel, prepared: Prepared, scores: Scores, readout: wire.ScoreReadout) -> Scores:
    """Return the similarity of each document to its query, from the embeddings of the queries and then the documents."""
    fitted = model.tokenizer.table.fitted
    assert fitted is not None, "a model without a preset embeds nothing"
    count, rows, time_slice = prepared.queries, list[Row](), TimeSlice()
    if isinstance(readout, wire.TokenVectors):
        size, skipped = model.info.token_vector_size, set(fitted.skipped)
        queries = [vectors_of(row, size) for row in scores.rows[:count]]
        texts = zip(scores.rows[count:], prepared.rows[count:], strict=True)
        documents = [vectors_of(row, size, ids, skipped) for row, ids in texts]
        rows = [(score,) for score in await asyncio.to_thread(max_similarity, queries, documents)]
    else:
        for place, row in enumerate(scores.rows[count:]):
            rows.append((similarity(scores.rows[0 if count == 1 else place], row, fitted.preset.similarity),))
            if time_slice.over:
                await time_slice.yield_to_loop()
    repeated = {place - count for place in scores.repeated if place >= count}
    return msgspec.structs.replace(scores, rows=rows, reused=scores.reused[count:], repeated=repeated)


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


def shared_fields(id: str, job: ScoringJob, scores: Scores) -> dict[str, Any]:
    """Return the fields that all answers with scores have."""
    return {
        "id": id,
        "created": int(time.time()),
        "model": job.model.name,
        "usage": usage_of(job.prepared, scores),
        "item_usage": item_usage_of(job.prepared, scores) if job.body.fields.return_item_usage else msgspec.UNSET,
        "errors": errors_of(job.prepared, scores),
    }


def item_usage_of(prepared: Prepared, scores: Scores) -> ItemUsage:
    """Return the usage of each item that has a result. Takes some milliseconds for the most items."""
    known = [place for place, row in enumerate(scores.rows) if row]
    items, lengths, free = prepared.places, [*map(len, prepared.rows[prepared.queries :])], scores.repeated
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


def fitted_of(request: AnyRequest, model: ServedModel, task: Task) -> Fitted:
    """Return the preset of ``model`` for ``task``; a header of the response names one that is a fallback. Raises
    :class:`InvalidRequest` that says what the model can do."""
    fitted = model.tokenizer.table.fitted
    if fitted is not None and fitted.serves(task):
        check_fallback(fitted, model, task)
        if model.preset_is_fallback:
            RequestContext.of(request).headers.append((b"x-yardstick-preset-fallback", fitted.preset.name.encode()))
        return fitted
    raise InvalidRequest(f"The model {model.name!r} is not {NEEDS[task]}; it serves {paths_of(model)}.", param="model")


ScoreAnswer = ScoreResponse | PairScores | Likelihoods


class Form(ABC):
    """One of the forms of request and answer."""

    field: ClassVar[str]
    """Field of the answer that holds the results."""
    readout: wire.ScoreReadout

    @abstractmethod
    def numbers(self, scores: Scores) -> int:
        """Return the amount of numbers in the results. A struct takes as much time as four."""

    async def arrange(self, scores: Scores) -> None:  # noqa: B027 - most forms have all items
        """Choose the items of the answer, in slices. Called once, before :meth:`answer` and :meth:`rows`."""

    @abstractmethod
    def answer(self, shared: dict[str, Any], scores: Scores) -> ScoreAnswer:
        """Return the answer without results. ``shared``: see :func:`shared_fields`."""

    @abstractmethod
    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[object]:
        """Yield the results in the order of the items."""

    @abstractmethod
    def chunk(self, id: str, results: list[tuple[int, Row]]) -> msgspec.Struct:
        """Return an event with some results."""


class LabelForm(Form):
    """Probabilities of labels."""

    field = "scores"

    def __init__(self, labels: list[int], *, softmax: bool, ids: Sequence[str] | None = None, top_n: int | None = None) -> None:
        """``ids``: of the items, if they are those of a catalogue. ``top_n``: most items of the answer, the best first."""
        self.readout = wire.Labels(labels, raw=softmax)  # the sum over the vocabulary cancels
        self._labels = len(labels)
        self._softmax = softmax
        self._ids = ids
        self._top_n = top_n
        self._best: Sequence[int] = ()
        """Places of the items of an answer with ``top_n``, the best first."""

    def numbers(self, scores: Scores) -> int:
        return len(scores.rows) * self._labels

    def answer(self, shared: dict[str, Any], scores: Scores) -> ScoreResponse:
        places = range(len(scores.rows)) if self._top_n is None else self._best
        ids = [] if self._ids is None else [self._ids[place] for place in places]
        return ScoreResponse(object="scoring", scores=[], ids=ids, **shared)

    async def arrange(self, scores: Scores) -> None:
        if self._top_n is None:
            return
        ranks, time_slice = [], TimeSlice()
        for row in scores.rows:
            ranks.append(-self.rank(row))
            if time_slice.over:
                await time_slice.yield_to_loop()
        self._best = sorted(range(len(ranks)), key=ranks.__getitem__)[: self._top_n]

    def rank(self, row: Row) -> float:
        """Return the score of the first label."""
        return softmax(row)[0] if self._softmax else math.exp(row[0])

    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[list[float] | None]:
        if self._top_n is not None:
            yield from (self._probabilities(scores.rows[place]) for place in self._best)
            return
        if not prepared.refused and not scores.errors and not self._softmax:
            yield from ([*map(math.exp, row)] for row in scores.rows)
            return
        refused = {refusal.index for refusal in prepared.refused}
        rows = iter(scores.rows)
        for place in range(len(scores.rows) + len(refused)):
            row = () if place in refused else next(rows)
            yield self._probabilities(row) if row else None

    def chunk(self, id: str, results: list[tuple[int, Row]]) -> ScoreChunk:
        ids = self._ids
        if ids is None:
            return ScoreChunk(id=id, data=[ItemScores(index=index, scores=self._probabilities(row)) for index, row in results])
        return ScoreChunk(id=id, data=[self.item(index, ids[index], row) for index, row in results])

    def item(self, index: int, id: str, row: Row) -> ItemScores:
        """Return the scores of an item of a catalogue."""
        return ItemScores(index=index, scores=self._probabilities(row), id=id)

    def _probabilities(self, row: Row) -> list[float]:
        return softmax(row) if self._softmax else [math.exp(value) for value in row]


class PairForm(Form):
    """One score for each pair, as the preset prescribes."""

    field = "data"

    def __init__(self, fitted: Fitted, *, raw: bool) -> None:
        """``raw``: the scores are the numbers before the preset's activation."""
        self.readout = fitted.readout
        self._fitted = fitted
        self._raw = raw

    def numbers(self, scores: Scores) -> int:
        return 4 * len(scores.rows)

    def answer(self, shared: dict[str, Any], scores: Scores) -> PairScores:  # noqa: ARG002 - of catalogues only
        return PairScores(object="list", data=[], **shared)

    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[PairScore]:
        for index, row in zip(prepared.places, scores.rows, strict=True):
            if row:
                yield PairScore(index=index, score=self._fitted.score(row, raw=self._raw))

    def chunk(self, id: str, results: list[tuple[int, Row]]) -> PairChunk:
        scores = ((index, self._fitted.score(row, raw=self._raw)) for index, row in results)
        return PairChunk(id=id, data=[PairScore(index=index, score=score) for index, score in scores])


class LikelihoodForm(Form):
    """Log-probability of each item's own tokens."""

    field = "data"
    readout = wire.Likelihood()

    def __init__(self, *, each_token: bool) -> None:
        self._each_token = each_token

    def numbers(self, scores: Scores) -> int:
        return 4 * len(scores.rows) + sum(map(len, scores.rows))

    def answer(self, shared: dict[str, Any], scores: Scores) -> Likelihoods:  # noqa: ARG002 - of catalogues only
        return Likelihoods(object="likelihood", data=[], **shared)

    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[ItemLikelihood]:
        return (self._item(index, row) for index, row in zip(prepared.places, scores.rows, strict=True) if row)

    def chunk(self, id: str, results: list[tuple[int, Row]]) -> LikelihoodChunk:
        return LikelihoodChunk(id=id, data=[self._item(index, row) for index, row in results])

    def _item(self, index: int, row: Row) -> ItemLikelihood:
        *logprobs, greedy = row
        total, count = sum(logprobs), len(logprobs)
        if total == -math.inf:  # JSON has no infinity
            logprobs = [max(logprob, LEAST_LOGPROB) for logprob in logprobs]
            total = sum(logprobs)
        return ItemLikelihood(
            index=index,
            logprob=total,
            mean_logprob=total / count,
            tokens=count,
            is_greedy=greedy == 1,
            token_logprobs=logprobs if self._each_token else None,
        )


def form_of(fields: ScoreRequest, prepared: Prepared, fitted: Fitted | None) -> Form:
    if fitted:
        return PairForm(fitted, raw=fields.raw)
    if fields.readout == "likelihood":
        return LikelihoodForm(each_token=bool(fields.return_token_logprobs))
    return LabelForm(prepared.labels, softmax=bool(fields.apply_softmax), ids=prepared.ids, top_n=fields.top_n)


def usage_of(prepared: Prepared, scores: Scores) -> Usage:
    """Return the token counts of a request that scores."""
    return usage_of_prompts(prepared.tokens, scores.cached_tokens)


def check_score(model: ServedModel, fields: ScoreRequest) -> None:
    """Raise :class:`InvalidRequest` for fields that contradict each other, and for a model that does not score."""
    given = next((name for name in ("ids", "top_n") if getattr(fields, name) is not None), None)
    if given is not None and fields.catalogue is None:
        more = " Without it, every item is scored; sort the answer." if given == "top_n" else ""
        raise InvalidRequest(f"`{given}` goes with `catalogue`.{more}", param=given)
    if fields.return_item_usage and fields.catalogue is not None and (fields.ids is None or fields.top_n):
        raise InvalidRequest("`return_item_usage` goes with `items`, or with `ids` without `top_n`.", param="return_item_usage")
    if fields.paired:
        return
    given = next((name for name in NAMES_OF_VLLM if getattr(fields, name) is not None), "raw_scores" if fields.raw_scores else None)
    if given is not None:
        raise InvalidRequest(f"`{given}` goes with `text_1` and `text_2`; for labels, use `apply_softmax`.", param=given)
    if "score" not in model.info.capabilities:
        raise InvalidRequest(f"The model {model.name!r} does not score; it serves {paths_of(model)}.", param="model")
