"""``POST /v1/score``."""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from engine import wire
from gateway.cache.base import Row
from gateway.errors import InvalidRequest
from gateway.generation.sequence import LEAST_LOGPROB
from gateway.ids import new_id
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.presets.fitted import Fitted, softmax
from gateway.routes.access import requested_model
from gateway.routes.body import Body, post_json
from gateway.routes.large import with_rows
from gateway.routes.reading import Reader
from gateway.routes.scoring import Scoring, ScoringJob, errors_of, fitted_of, headers_of, item_usage_of
from gateway.schemas.score import (
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
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.scoring.scorer import Scores
from gateway.tenancy import priority_of
from gateway.text.prepared import Prepared

ScoreAnswer = ScoreResponse | PairScores | Likelihoods
LARGE_SCORES = 2000
"""Number of scores above which the response is built in slices; this many take about a millisecond."""


def score_route(pool: Pool, reader: Reader, scoring: Scoring) -> HTTPRouteHandler:
    """Create the route."""

    @post_json(["/v1/score", "/score"], ScoreRequest, "scoring")
    async def score(request: Request[Any, Any, Any], data: JSONBody[Body[ScoreRequest]]) -> Response[ScoreAnswer]:
        """Score items against a query.

        Each item's prompt is the query and the item, tokenised exactly as the joined text. A score is the probability of a label as
        the next token: over the whole vocabulary, or with `apply_softmax` over the labels. An item's scores do not depend on the
        other items. With the readout `likelihood`, the answer is a list of `data` with the log-probability of each item's own
        tokens after the query. With `text_1` and `text_2` (vLLM's form) pairs of texts are scored as the model's preset prescribes,
        and the answer is a list of `data` with a `score` for each. `Cache-Control: no-cache` computes all scores again, and
        `no-store` also stores none; the response header `x-yardstick-cache` gives the number of items whose scores were reused.
        """
        async with reader.open(request, ScoreRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            fitted = fitted_of(model, "rerank") if fields.paired else None
            _check(model, fields)
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        form = _form_of(fields, prepared, fitted)
        id = f"score-{new_id()}"

        def closing(scores: Scores) -> ScoreAnswer:
            usage = item_usage_of(prepared, scores, asked=fields.return_item_usage)
            return msgspec.structs.replace(form.answer(id, model, prepared, scores), item_usage=usage)

        job = ScoringJob(
            request=request,
            model=model,
            prepared=prepared,
            readout=form.readout,
            priority=priority,
            cache_salt=fields.cache_salt,
            partial=bool(fields.partial_results),
        )
        if fields.stream:
            return await scoring.stream(job, functools.partial(form.chunk, id), closing)
        scores = await scoring.score(job)
        large = form.numbers(scores) > LARGE_SCORES
        rows = form.rows(prepared, scores)
        return await with_rows(closing(scores), form.field, rows, large=large, headers=headers_of(prepared, scores))

    return score


class _Form(ABC):
    """One of the forms of request and answer."""

    field: ClassVar[str]
    """Field of the answer that holds the results."""
    readout: wire.Readout

    @abstractmethod
    def numbers(self, scores: Scores) -> int:
        """Return the amount of numbers in the results. A struct takes as much time as four."""

    @abstractmethod
    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> ScoreAnswer:
        """Return the answer without results."""

    @abstractmethod
    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[object]:
        """Yield the results in the order of the items."""

    @abstractmethod
    def chunk(self, id: str, results: list[tuple[int, Row]]) -> msgspec.Struct:
        """Return an event with some results."""


class _LabelForm(_Form):
    """Probabilities of labels."""

    field = "scores"

    def __init__(self, labels: list[int], *, softmax: bool) -> None:
        self.readout = wire.Labels(labels)
        self._labels = len(labels)
        self._softmax = softmax

    def numbers(self, scores: Scores) -> int:
        return len(scores.rows) * self._labels

    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> ScoreResponse:
        created, usage, errors = int(time.time()), _usage(prepared, scores), errors_of(prepared, scores)
        return ScoreResponse(id=id, object="scoring", created=created, model=model.name, scores=[], usage=usage, errors=errors)

    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[list[float] | None]:
        refused = {refusal.index for refusal in prepared.refused}
        rows = iter(scores.rows)
        for place in range(len(scores.rows) + len(refused)):
            row = () if place in refused else next(rows)
            yield self._probabilities(row) if row else None

    def chunk(self, id: str, results: list[tuple[int, Row]]) -> ScoreChunk:
        return ScoreChunk(id=id, data=[ItemScores(index=index, scores=self._probabilities(row)) for index, row in results])

    def _probabilities(self, row: Row) -> list[float]:
        return softmax(row) if self._softmax else [math.exp(value) for value in row]


class _PairForm(_Form):
    """One score for each pair, as the preset prescribes."""

    field = "data"

    def __init__(self, fitted: Fitted) -> None:
        self.readout = fitted.readout
        self._fitted = fitted

    def numbers(self, scores: Scores) -> int:
        return 4 * len(scores.rows)

    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> PairScores:
        created, usage, errors = int(time.time()), _usage(prepared, scores), errors_of(prepared, scores)
        return PairScores(id=id, object="list", created=created, model=model.name, data=[], usage=usage, errors=errors)

    def rows(self, prepared: Prepared, scores: Scores) -> Iterator[PairScore]:
        for index, row in zip(prepared.places, scores.rows, strict=True):
            if row:
                yield PairScore(index=index, score=self._fitted.score(row))

    def chunk(self, id: str, results: list[tuple[int, Row]]) -> PairChunk:
        return PairChunk(id=id, data=[PairScore(index=index, score=self._fitted.score(row)) for index, row in results])


class _LikelihoodForm(_Form):
    """Log-probability of each item's own tokens."""

    field = "data"
    readout = wire.Likelihood()

    def __init__(self, *, each_token: bool) -> None:
        self._each_token = each_token

    def numbers(self, scores: Scores) -> int:
        return 4 * len(scores.rows) + sum(map(len, scores.rows))

    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> Likelihoods:
        created, usage, errors = int(time.time()), _usage(prepared, scores), errors_of(prepared, scores)
        return Likelihoods(id=id, object="likelihood", created=created, model=model.name, data=[], usage=usage, errors=errors)

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


def _form_of(fields: ScoreRequest, prepared: Prepared, fitted: Fitted | None) -> _Form:
    if fitted:
        return _PairForm(fitted)
    if fields.readout == "likelihood":
        return _LikelihoodForm(each_token=bool(fields.return_token_logprobs))
    return _LabelForm(prepared.labels, softmax=bool(fields.apply_softmax))


def _usage(prepared: Prepared, scores: Scores) -> Usage:
    tokens = prepared.tokens
    return Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(scores.cached_tokens))


def _check(model: ServedModel, fields: ScoreRequest) -> None:
    if not fields.paired and "score" not in model.info.capabilities:
        raise InvalidRequest(f"The model {model.name!r} does not score; use /v1/completions.", param="model")
