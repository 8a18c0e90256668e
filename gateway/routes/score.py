"""``POST /v1/score``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from gateway.cache.base import Logprobs
from gateway.cache.policy import CachePolicy
from gateway.errors import InvalidRequest
from gateway.exchange import Exchange, new_id
from gateway.limits.quotas import Quotas
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.routes.access import requested_model
from gateway.routes.body import post_json
from gateway.routes.tokens import check_ids, tokenised
from gateway.schemas.score import ScoreRequest, ScoreResponse
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.scoring.scorer import Prompts, Scorer
from gateway.streams import while_connected
from gateway.telemetry import Telemetry
from gateway.tenancy import caller_of, priority_of
from gateway.text.prompts import EmptyPromptError, join_ids, tokenise_pairs


def score_route(pool: Pool, scorer: Scorer, quotas: Quotas, telemetry: Telemetry) -> HTTPRouteHandler:
    """The endpoint."""

    @post_json("/v1/score", ScoreRequest, "scoring")
    async def score(request: Request[Any, Any, Any], data: JSONBody[ScoreRequest]) -> Response[ScoreResponse]:
        """Score items against a query.

        Each item's prompt is the query and the item, tokenised exactly as the joined text. A score is the probability of a label as
        the next token: over the whole vocabulary, or with `apply_softmax` over the labels. An item's scores do not depend on the
        other items. `Cache-Control: no-cache` computes everything anew, `no-store` keeps nothing either; the header
        `x-yardstick-cache` of the answer says how many of the results were at hand.
        """
        model = requested_model(request, pool, data.model)
        priority = priority_of(request, data.priority)
        labels = _labels(model, data)
        async with while_connected(request.receive):
            prefix, branches = await _tokenise(model, data)
            policy = CachePolicy.of(request)
            caller = caller_of(request, cache_salt=data.cache_salt)
            prompts = Prompts(prefix, branches, labels, priority, caller)
            _check_lengths(model, prompts)
            tokens, items = sum(prompts.lengths), len(branches)
            account = Exchange.of(request).account
            account.prompt_tokens, account.items = tokens, items
            lease = await quotas.charge(request, tokens=tokens, items=items)
            scores = await scorer.score(model, prompts, policy, lease)
        hits = scores.hits
        account.cache_hits, account.cached_tokens, account.queue_seconds = hits, scores.cached_tokens, scores.queue_seconds
        telemetry.scored(account)
        answer = ScoreResponse(
            id=f"score-{new_id()}",
            created=int(time.time()),
            model=model.name,
            scores=[_softmax(row) if data.apply_softmax else [math.exp(value) for value in row] for row in scores.logprobs],
            usage=Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(scores.cached_tokens)),
        )
        return Response(answer, headers={"x-yardstick-cache": f"{hits}/{items}"})

    return score


def _labels(model: ServedModel, data: ScoreRequest) -> list[int]:
    """The token ids whose probability is asked for."""
    if (data.labels is None) == (data.label_token_ids is None):
        raise InvalidRequest("Give either `labels` (texts) or `label_token_ids`, to say which tokens are scored.", param="labels")
    param = "labels" if data.labels is not None else "label_token_ids"
    if data.labels is not None:
        labels = [_label(model, text, index) for index, text in enumerate(data.labels)]
    else:
        labels = data.label_token_ids or []
    if not labels:
        raise InvalidRequest(f"`{param}` is empty; name at least one token.", param=param)
    if len(labels) > model.info.limits.max_labels:
        raise InvalidRequest(
            f"`{param}` has {len(labels)} labels; at most {model.info.limits.max_labels} are answered.", param=param
        )
    for index, label in enumerate(labels):
        if not model.tokenizer.has_token(label):
            known = f"ids are 0 to {model.tokenizer.vocab_size - 1}"
            raise InvalidRequest(
                f"`{param}[{index}]`: {label} is not a token of {model.name!r}; {known}.", param=f"{param}[{index}]"
            )
    return labels


def _label(model: ServedModel, text: str, index: int) -> int:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    if len(ids) == 1:
        return ids[0]
    pieces = ", ".join(f"{model.tokenizer.token_text(id)!r} ({id})" for id in ids[:16]) or "none"
    raise InvalidRequest(
        f"`labels[{index}]`: {text[:100]!r} is {len(ids)} tokens of {model.name!r}, not one: {pieces}."
        " Choose a label that is one token.",
        param=f"labels[{index}]",
    )


async def _tokenise(model: ServedModel, data: ScoreRequest) -> tuple[list[int], list[list[int]]]:
    """The prompts as prefix and branches."""
    query, item_first = data.query, bool(data.item_first)
    items = [data.items] if isinstance(data.items, str) else data.items
    try:
        if isinstance(query, str):
            texts = [item for item in items if isinstance(item, str)]
            _check_kinds(texts, items, "text")
            characters = len(query) * len(texts) + sum(map(len, texts))
            return await tokenised(characters, tokenise_pairs, model.tokenizer, query, texts, item_first=item_first)
        lists = [item for item in items if not isinstance(item, str)]
        _check_kinds(lists, items, "token ids")
        check_ids(model, query, "query")
        for index, item in enumerate(lists):
            check_ids(model, item, f"items[{index}]")
        return join_ids(query, lists, item_first=item_first)
    except EmptyPromptError as error:
        raise InvalidRequest(f"{error}.", param=f"items[{error.index}]") from None


def _check_kinds(fitting: list[str] | list[list[int]], items: Sequence[str | list[int]], kind: str) -> None:
    if len(fitting) != len(items):
        index = next(index for index, item in enumerate(items) if isinstance(item, str) != (kind == "text"))
        raise InvalidRequest(
            f"`items[{index}]` is of another kind than `query`, which is {kind}; give all as text, or all as token ids.",
            param=f"items[{index}]",
        )


def _check_lengths(model: ServedModel, prompts: Prompts) -> None:
    if "score" not in model.info.capabilities:
        raise InvalidRequest(f"The model {model.name!r} does not score; use /v1/completions.", param="model")
    for index, length in enumerate(prompts.lengths):
        model.check_prompt(length, f"items[{index}]")


def _softmax(row: Logprobs) -> list[float]:
    """Probabilities over the labels alone."""
    highest = max(row)
    if highest == -math.inf:  # no label is possible; none is more so than another
        return [1 / len(row)] * len(row)
    weights = [math.exp(value - highest) for value in row]
    total = sum(weights)
    return [weight / total for weight in weights]
