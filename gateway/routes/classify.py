"""``POST /v1/classify`` and ``/classify``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from engine import wire
from gateway.cache.base import Row
from gateway.handling.access import priority_of, requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.large import with_rows
from gateway.handling.reader import Reader
from gateway.handling.scoring import Scoring, ScoringJob, fitted_of, headers_of
from gateway.ids import new_id
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.presets.preset import Fitted, sigmoid, softmax
from gateway.schemas.classify import Category, Classification, ClassifyRequest, ClassifyResponse
from gateway.schemas.usage import PromptTokensDetails, Usage

LARGE_NUMBERS = 1000
"""Number of probabilities above which the response is built in slices; this many take about a millisecond."""


def classify_route(pool: Pool, reader: Reader, scoring: Scoring) -> HTTPRouteHandler:
    """Create the route."""

    @post_json(["/v1/classify", "/classify"], ClassifyRequest, "scoring")
    async def classify(request: Request[Any, Any, Any], data: JSONBody[Body[ClassifyRequest]]) -> Response[ClassifyResponse]:
        """Classify texts.

        A model with a classification head gives the probability of each class, and a reward model its reward. A guard model gives
        the probability of its verdicts and of the categories that it knows. Results are cached like those of `/v1/score`.
        """
        async with reader.open(request, ClassifyRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            fitted = fitted_of(request, model, "classify")
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        job = ScoringJob(
            request=request,
            model=model,
            prepared=prepared,
            readout=fitted.readout,
            priority=priority,
            cache_salt=fields.cache_salt,
        )
        scores = await scoring.score(job)
        names = class_names(fitted, model)
        rows = _classifications(fitted, model.info, names, scores.rows, raw=fields.raw)
        tokens = prepared.tokens
        answer = ClassifyResponse(
            id=f"classify-{new_id()}",
            created=int(time.time()),
            model=model.name,
            classes=list(names),
            data=[],
            usage=Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(scores.cached_tokens)),
        )
        large = sum(map(len, scores.rows)) > LARGE_NUMBERS
        return await with_rows(answer, "data", rows, large=large, headers=headers_of(prepared, scores))

    return classify


def class_names(fitted: Fitted, model: ServedModel) -> Sequence[str]:
    """Return the names of the classes of a head, or of the preset's labels."""
    return model.info.classes if isinstance(fitted.readout, wire.Classes) else fitted.names


def probabilities(fitted: Fitted, row: Row, info: wire.Info, *, raw: bool) -> list[float]:
    """Return the probability of each class, or with ``raw`` the number before the activation."""
    return _head(fitted, row, info, raw=raw) if isinstance(fitted.readout, wire.Classes) else _verdicts(fitted, row, raw=raw)


def _classifications(
    fitted: Fitted, info: wire.Info, names: Sequence[str], rows: Sequence[Row], *, raw: bool
) -> Iterator[Classification]:
    """Yield the classification of each text, with ``raw`` before the activation. With categories, each text has two rows."""
    step = 2 if fitted.categories else 1
    for index in range(len(rows) // step):
        row = rows[step * index]
        probs = probabilities(fitted, row, info, raw=raw)
        categories = _categories(fitted, rows[step * index + 1]) if fitted.categories else None
        label = names[max(range(len(probs)), key=probs.__getitem__)]
        yield Classification(index=index, label=label, probs=probs, num_classes=len(probs), categories=categories)


def _head(fitted: Fitted, row: Row, info: wire.Info, *, raw: bool) -> list[float]:
    """Return the probabilities of a head's classes; its logits with ``raw``, and for one class, a regression or no activation."""
    activation = fitted.preset.activation
    if raw or len(row) == 1 or info.regression or activation == "none":
        return list(row)
    return [sigmoid(logit) for logit in row] if info.multi_label or activation == "sigmoid" else softmax(row)


def _verdicts(fitted: Fitted, row: Row, *, raw: bool) -> list[float]:
    """Return the probabilities of a guard model's labels, or with ``raw`` their logits (log-probabilities with categories)."""
    logits = fitted.label_logits(row)
    return logits if raw else softmax(logits)


def _categories(fitted: Fitted, row: Row) -> list[Category]:
    assert fitted.preset.categories is not None
    named = zip(fitted.preset.categories.names.values(), fitted.category_logprobs(row), strict=True)
    categories = [Category(name=name, prob=math.exp(logprob)) for name, logprob in named]
    return sorted(categories, key=lambda category: -category.prob)
