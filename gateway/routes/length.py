"""``POST /v1/length``."""

from __future__ import annotations

import time
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from engine import wire
from gateway.generation.length import require_lenvm, value_and_remaining
from gateway.handling.access import priority_of, requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.large import with_rows
from gateway.handling.reader import Reader
from gateway.handling.scoring import Scoring, ScoringJob, headers_of
from gateway.ids import new_id
from gateway.pool.pool import Pool
from gateway.schemas.length import LengthRequest, LengthResponse, Remaining
from gateway.schemas.usage import PromptTokensDetails, Usage

LARGE_TEXTS = 500
"""Number of texts above which the response is built in slices; this many take about a millisecond."""


def length_route(pool: Pool, reader: Reader, scoring: Scoring) -> HTTPRouteHandler:
    """Create the route."""

    @post_json("/v1/length", LengthRequest, "length")
    async def length(request: Request[Any, Any, Any], data: JSONBody[Body[LengthRequest]]) -> Response[LengthResponse]:
        """Estimate how much text is still to come.

        For each text, the length model's value and what it means in tokens. Give whole texts as `input`, or a `prompt` or
        `messages` with the `partial` answers that have been written so far. Values are cached like scores, see `/v1/score`.
        """
        async with reader.open(request, LengthRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            own_gamma = require_lenvm(model, "model")
            gamma = fields.gamma or own_gamma
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        job = ScoringJob(
            request=request,
            model=model,
            prepared=prepared,
            readout=wire.LengthValue(),
            priority=priority,
            cache_salt=fields.cache_salt,
        )
        values = await scoring.score(job)
        tokens, texts = prepared.tokens, len(prepared.rows)
        answer = LengthResponse(
            id=f"length-{new_id()}",
            created=int(time.time()),
            model=model.name,
            gamma=gamma,
            data=[],
            usage=Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(values.cached_tokens)),
        )
        rows = (_remaining(index, logit, gamma) for index, (logit,) in enumerate(values.rows))
        return await with_rows(answer, "data", rows, large=texts > LARGE_TEXTS, headers=headers_of(prepared, values))

    return length


def _remaining(index: int, logit: float, gamma: float) -> Remaining:
    value, tokens = value_and_remaining(logit, gamma)
    return Remaining(index=index, value=value, remaining_tokens=tokens)
