"""``POST /v1/length``."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from gateway.errors import InvalidRequest
from gateway.exchange import Exchange, new_id
from gateway.length.guidance import check_guide
from gateway.length.remaining import value_and_remaining
from gateway.length.valuer import Valuer
from gateway.limits.quotas import Quotas
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.routes.access import requested_model
from gateway.routes.body import post_json
from gateway.routes.tokens import Prompt, check_ids, read_prompts, rendered
from gateway.schemas.length import MAX_TEXTS, LengthRequest, LengthResponse, Remaining, Texts
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.streams import while_connected
from gateway.telemetry import Telemetry
from gateway.tenancy import caller_of, priority_of
from gateway.text.prompts import share_prefix


def length_route(pool: Pool, valuer: Valuer, quotas: Quotas, telemetry: Telemetry) -> HTTPRouteHandler:
    """The endpoint."""

    @post_json("/v1/length", LengthRequest, "length")
    async def length(request: Request[Any, Any, Any], data: JSONBody[LengthRequest]) -> Response[LengthResponse]:
        """Estimate how much text is still to come.

        For each text, the length model's value and what it means in tokens. Give whole texts as `input`, or a `prompt` or
        `messages` with the `partial` answers that have been written so far.
        """
        model = requested_model(request, pool, data.model)
        own_gamma = check_guide(model, "model")
        gamma = data.gamma or own_gamma
        caller, priority = caller_of(request, cache_salt=data.cache_salt), priority_of(request, data.priority)
        async with while_connected(request.receive):
            texts = await _texts(model, data)
            for text in texts:
                _check_length(model, text)
            tokens = sum(len(text.ids) for text in texts)
            account = Exchange.of(request).account
            account.prompt_tokens, account.items = tokens, len(texts)
            lease = await quotas.charge(request, tokens=tokens, items=len(texts))
            values = await valuer.values(model, share_prefix([text.ids for text in texts]), priority, caller, lease)
        account.cached_tokens, account.queue_seconds = values.cached_tokens, values.queue_seconds
        telemetry.valued(account)
        answer = LengthResponse(
            id=f"length-{new_id()}",
            created=int(time.time()),
            model=model.name,
            gamma=gamma,
            data=[_remaining(index, logit, gamma) for index, logit in enumerate(values.logits)],
            usage=Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(values.cached_tokens)),
        )
        return Response(answer)

    return length


def _remaining(index: int, logit: float, gamma: float) -> Remaining:
    value, tokens = value_and_remaining(logit, gamma)
    return Remaining(index=index, value=value, remaining_tokens=tokens)


def _check_length(model: ServedModel, text: Prompt) -> None:
    if not text.ids:
        raise InvalidRequest(f"`{text.param}` is empty; there is no token to judge.", param=text.param)
    model.check_prompt(len(text.ids), text.param)


async def _texts(model: ServedModel, data: LengthRequest) -> list[Prompt]:
    given = [name for name in ("input", "prompt", "messages") if getattr(data, name) is not None]
    if len(given) != 1:
        message = "Give one of `input` (texts), `prompt` (with `partial` answers) and `messages`."
        raise InvalidRequest(message, param=given[1] if given else "input")
    if data.partial is not None and data.input is not None:
        raise InvalidRequest("`partial` goes with `prompt` or `messages`; `input` is whole texts.", param="partial")
    if data.messages is not None:
        return await _answers(model, data)
    if data.prompt is not None and data.partial is not None:
        return await read_prompts(model, _joined(model, data.prompt, data.partial), "partial", at_most=MAX_TEXTS)
    whole = data.prompt if data.input is None else data.input
    assert whole is not None
    return await read_prompts(model, whole, given[0], at_most=MAX_TEXTS)


async def _answers(model: ServedModel, data: LengthRequest) -> list[Prompt]:
    """The conversation, or the conversation with each of the partial answers."""
    text = await asyncio.to_thread(rendered, model, data.messages or [], data.chat_template_kwargs)
    param = "messages" if data.partial is None else "partial"
    return await read_prompts(model, _joined(model, text, data.partial or ""), param, at_most=MAX_TEXTS, add_special_tokens=False)


def _joined(model: ServedModel, prompt: Texts, partial: Texts) -> Texts:
    """Each answer so far behind its prompt. Raises :class:`InvalidRequest` where there is not one prompt or the kinds differ."""
    if isinstance(prompt, str):
        if isinstance(partial, str):
            return prompt + partial
        texts = [answer for answer in partial if isinstance(answer, str)]
        _check_kinds(len(texts), partial, "text")
        return [prompt + answer for answer in texts]
    start = [id for id in prompt if isinstance(id, int)]
    if len(start) != len(prompt):
        message = "`partial` goes with one prompt, a text or one list of token ids; give other texts whole, as `input`."
        raise InvalidRequest(message, param="partial")
    check_ids(model, start, "prompt")
    if isinstance(partial, str) or isinstance(partial[0], int):
        ids = [id for id in partial if isinstance(id, int)]
        _check_kinds(len(ids), partial, "token ids")
        check_ids(model, ids, "partial")
        return [*start, *ids]
    lists = [answer for answer in partial if isinstance(answer, list)]
    _check_kinds(len(lists), partial, "token ids")
    for index, answer in enumerate(lists):
        check_ids(model, answer, f"partial[{index}]")
    return [[*start, *answer] for answer in lists]


def _check_kinds(fitting: int, partial: Texts, kind: str) -> None:
    if fitting != len(partial):
        message = f"`partial` is not all of the prompt's kind, which is {kind}; give all as text, or all as token ids."
        raise InvalidRequest(message, param="partial")
