"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from engine import wire
from gateway.breathing import Breath
from gateway.errors import InvalidRequest
from gateway.generation.plan import check, plan
from gateway.generation.sequence import Piece, Token
from gateway.lenvm.length_guidance import gamma_of_values, guidance_of, refuse_sections
from gateway.lenvm.remaining import remaining_tokens
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.routes.access import requested_model
from gateway.routes.body import Body, post_json
from gateway.routes.generating import Answer, Generator, system_fingerprint
from gateway.routes.reading import Reader
from gateway.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from gateway.schemas.usage import Usage
from gateway.tenancy import caller_of, priority_of
from gateway.text.prepared import as_list
from gateway.text.vocabulary import Vocabulary

DEFAULT_MAX_TOKENS = 16


def completion_route(pool: Pool, reader: Reader, generator: Generator) -> HTTPRouteHandler:
    """Create the route."""

    @post_json("/v1/completions", CompletionRequest, "generation")
    async def complete(request: Request[Any, Any, Any], data: JSONBody[Body[CompletionRequest]]) -> Response[Completion]:
        """Continue prompts.

        With `stream` the answer is a stream of server-sent events, each a completion with what is new, and `[DONE]` at the end.
        """
        async with reader.open(request, CompletionRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            _check(model, fields)
            guidance = guidance_of(model, fields, logprobs=fields.logprobs)
            refuse_sections(guidance)
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        caller = caller_of(request, cache_salt=fields.cache_salt)
        generations, breath = [], Breath()
        for index, prompt in enumerate(prepared.rows):
            generation = plan(
                model,
                fields,
                as_list(prompt),
                max_tokens=_default_max_tokens(guidance) if fields.max_tokens is None else fields.max_tokens,
                logprobs=fields.logprobs,
                guidance=guidance,
                grammar=prepared.grammar,
                bad_words=prepared.bad_words,
                first_index=index * fields.sequences,
                echo=prepared.texts[index] if prepared.texts else None,
                param=prepared.param_of(index),
                priority=priority,
                caller=caller,
            )
            generations.append(generation)
            if breath.due:
                await breath.take()
        answer = CompletionAnswer(model, logprobs=fields.logprobs is not None, gamma=gamma_of_values(model, guidance))
        return await generator.respond(request, generations, answer, fields)

    return complete


def _default_max_tokens(guidance: wire.LengthGuidance | None) -> int:
    """Return OpenAI's default, plus room for a target length and for a text that overshoots it."""
    target = guidance.target_length if guidance else None
    return DEFAULT_MAX_TOKENS + 2 * (target or 0)


def _check(model: ServedModel, data: CompletionRequest) -> None:
    check(model, data, logprobs=data.logprobs)
    if data.best_of is not None and data.best_of != data.sequences:
        raise InvalidRequest("`best_of` other than `n` is not supported; ask for `n` completions and choose.", param="best_of")
    if data.max_tokens == 0 and not data.echo:
        raise InvalidRequest("`max_tokens` can be 0 only with `echo`.", param="max_tokens")


class CompletionAnswer(Answer):
    """Builds the response bodies of this endpoint."""

    def __init__(self, model: ServedModel, *, logprobs: bool, gamma: float | None) -> None:
        """``gamma``: discount factor of the length values in log-probabilities; None if there are none."""
        self._model = model
        self._logprobs = logprobs
        self._gamma = gamma
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._fingerprint = system_fingerprint(model)

    def logprobs(self, tokens: list[Token]) -> CompletionLogprobs | None:
        return _logprobs(self._model.tokenizer, tokens, self._gamma) if self._logprobs else None

    def whole(self, choices: list[Piece], logprobs: list[CompletionLogprobs | None], usage: Usage) -> Completion:
        return self._completion([_choice(piece, told) for piece, told in zip(choices, logprobs, strict=True)], usage)

    def chunk(self, piece: Piece, usage: Usage | None) -> Completion:
        return self._completion([_choice(piece, self.logprobs(piece.tokens))], usage)

    def opening(self, _: int, _usage: Usage | None, /) -> None:
        return None

    def closing(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )


def _choice(piece: Piece, logprobs: CompletionLogprobs | None) -> CompletionChoice:
    return CompletionChoice(index=piece.index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish)


def _logprobs(tokenizer: Vocabulary, tokens: list[Token], gamma: float | None) -> CompletionLogprobs:
    """Convert ``tokens`` to lists. Tokens with equal text (parts of characters) share an entry of ``top_logprobs``; the more
    probable one keeps it."""
    told = CompletionLogprobs()
    if gamma is not None:
        values = [
            {tokenizer.token_text(id): token.values[id] for id, _ in token.top[::-1] if id in token.values} for token in tokens
        ]
        told.top_values = [row or None for row in values]
        told.top_remaining_tokens = [
            {text: remaining_tokens(value, gamma) for text, value in row.items()} or None for row in values
        ]
    for token in tokens:
        text = tokenizer.token_text(token.id)
        told.tokens.append(text)
        told.token_logprobs.append(token.logprob)
        told.text_offset.append(token.offset)
        if token.logprob is None:
            told.top_logprobs.append(None)
            continue
        ranked = [*((tokenizer.token_text(id), logprob) for id, logprob in token.top), (text, token.logprob)]
        told.top_logprobs.append(dict(sorted(ranked, key=lambda entry: entry[1])))
    return told
