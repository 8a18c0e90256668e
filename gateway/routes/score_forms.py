"""The forms of a score's answer: probabilities of labels, scores of pairs, and likelihoods."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from engine import wire
from gateway.cache.base import Row
from gateway.errors import InvalidRequest
from gateway.generation.sequence import LEAST_LOGPROB
from gateway.handling.scoring import errors_of
from gateway.pool.replica import ServedModel, paths_of
from gateway.presets.preset import Fitted, softmax
from gateway.process.time_slices import TimeSlice
from gateway.schemas.activation import NAMES_OF_VLLM
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
from gateway.text.prepared import Prepared

ScoreAnswer = ScoreResponse | PairScores | Likelihoods
LARGE_SCORES = 2000
"""Number of scores above which the response is built in slices; this many take about a millisecond."""


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
    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> ScoreAnswer:
        """Return the answer without results."""

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

    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> ScoreResponse:
        created, usage, errors = int(time.time()), _usage(prepared, scores), errors_of(prepared, scores)
        answer = ScoreResponse(id=id, object="scoring", created=created, model=model.name, scores=[], usage=usage, errors=errors)
        if self._ids is None:
            return answer
        places = range(len(scores.rows)) if self._top_n is None else self._best
        return msgspec.structs.replace(answer, ids=[self._ids[place] for place in places])

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

    def answer(self, id: str, model: ServedModel, prepared: Prepared, scores: Scores) -> PairScores:
        created, usage, errors = int(time.time()), _usage(prepared, scores), errors_of(prepared, scores)
        return PairScores(id=id, object="list", created=created, model=model.name, data=[], usage=usage, errors=errors)

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


def form_of(fields: ScoreRequest, prepared: Prepared, fitted: Fitted | None) -> Form:
    if fitted:
        return PairForm(fitted, raw=fields.raw)
    if fields.readout == "likelihood":
        return LikelihoodForm(each_token=bool(fields.return_token_logprobs))
    return LabelForm(prepared.labels, softmax=bool(fields.apply_softmax), ids=prepared.ids, top_n=fields.top_n)


def _usage(prepared: Prepared, scores: Scores) -> Usage:
    tokens = prepared.tokens
    return Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(scores.cached_tokens))


def check_score(model: ServedModel, fields: ScoreRequest) -> None:
    """Raise :class:`InvalidRequest` for fields that contradict each other, and for a model that does not score."""
    given = next((name for name in ("ids", "top_n") if getattr(fields, name) is not None), None)
    if given is not None and fields.catalogue is None:
        more = " Without it, every item is scored; sort the answer." if given == "top_n" else ""
        raise InvalidRequest(f"`{given}` goes with `catalogue`.{more}", param=given)
    if fields.return_item_usage and fields.catalogue is not None and (fields.ids is None or fields.top_n):
        raise InvalidRequest("`return_item_usage` goes with `items`, or with `ids` without `top_n`.", param="return_item_usage")
    if not fields.paired:
        _check_activation(fields)
    if not fields.paired and "score" not in model.info.capabilities:
        raise InvalidRequest(f"The model {model.name!r} does not score; it serves {paths_of(model)}.", param="model")


def _check_activation(fields: ScoreRequest) -> None:
    """Raise :class:`InvalidRequest` for a field that says how the scores of pairs follow from logits."""
    given = next((name for name in NAMES_OF_VLLM if getattr(fields, name) is not None), "raw_scores" if fields.raw_scores else None)
    if given is not None:
        raise InvalidRequest(f"`{given}` goes with `text_1` and `text_2`; for labels, use `apply_softmax`.", param=given)
