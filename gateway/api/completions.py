"""``/v1/completions``: route, answer and chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping

from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.access import caller_of, priority_of, requested_model
from yardstick_llm.gateway.api.generation import Answer, Generator, system_fingerprint
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.generation import TOKEN_IDS, Generation, PromptOutput, prompt_ids
from yardstick_llm.gateway.generation.length import gamma_of_values, guidance_of, refuse_sections, remaining_tokens
from yardstick_llm.gateway.generation.plan import check, plan
from yardstick_llm.gateway.generation.sequence import Piece, Token
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.requests.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from yardstick_llm.gateway.schemas.common import Usage, new_id

DEFAULT_MAX_TOKENS = 16
TOKENS_OF_UNIT = {"tokens": 1, "words": 2, "sentences": 40, "characters": 1}
"""More tokens than nearly every text takes, in units of a target length."""


def completion_route(pool: Pool, reader: Reader, generator: Generator) -> HTTPRouteHandler:
    """Create the route."""

    @post_json("/v1/completions", "generation")
    async def complete(request: AnyRequest, data: JSONBody[Body[CompletionRequest]]) -> Response[Completion]:
        """Continue prompts.

        With `stream` the answer is a stream of server-sent events, each a completion with what is new, and `[DONE]` at the end.
        """
        body = await reader.body(request, CompletionRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model, falls_back=True)
        _check(model, fields)
        guidance = guidance_of(model, fields, logprobs=fields.logprobs)
        refuse_sections(guidance)
        priority = priority_of(request, fields.priority)
        prepared = await body.read(model)
        caller = caller_of(request, cache_salt=fields.cache_salt)
        logprobs = 0 if fields.logprobs is None and fields.is_choosy else fields.logprobs
        generations = [
            plan(
                model,
                fields,
                prepared,
                place,
                max_tokens=_default_max_tokens(guidance) if fields.max_tokens is None else fields.max_tokens,
                logprobs=logprobs,
                guidance=guidance,
                priority=priority,
                caller=caller,
            )
            for place in range(len(prepared.rows))
        ]
        answer = CompletionAnswer(model, fields, generations, gamma=gamma_of_values(model, guidance))
        return await generator.respond(request, generations, answer, fields)

    return complete


def _default_max_tokens(guidance: wire.LengthGuidance | None) -> int:
    """Return OpenAI's default, plus room for a target length and for a text that overshoots it."""
    if guidance is None or guidance.target_length is None:
        return DEFAULT_MAX_TOKENS
    return DEFAULT_MAX_TOKENS + 2 * guidance.target_length * TOKENS_OF_UNIT[guidance.unit]


def _check(model: ServedModel, data: CompletionRequest) -> None:
    most = model.info.limits.max_sequences
    if data.is_choosy and data.sequences > most:
        raise InvalidRequest(f"`best_of` is at most {most} with this model.", param="best_of")
    check(model, data, logprobs=data.logprobs)
    if data.best_of is not None and data.best_of < data.completions:
        raise InvalidRequest("`best_of` is less than `n`; draw at least `n` completions.", param="best_of")
    if data.is_choosy and data.stream:
        raise InvalidRequest("`best_of` is not for streams: the best completions are known at the end.", param="best_of")
    if data.max_tokens == 0 and not data.echo:
        raise InvalidRequest("`max_tokens` can be 0 only with `echo`.", param="max_tokens")


class CompletionAnswer(Answer):
    """Builds the response bodies of this endpoint."""

    def __init__(
        self, model: ServedModel, fields: CompletionRequest, generations: list[Generation], *, gamma: float | None
    ) -> None:
        """``gamma``: discount factor of the length values in log-probabilities; None if there are none."""
        self._model = model
        self._fields = fields
        self._gamma = gamma
        self._texts = TOKEN_IDS if fields.return_tokens_as_token_ids else model.tokenizer.texts
        self._unshown = {
            generation.sequences[0].index: ids for generation in generations if (ids := prompt_ids(generation, fields)) is not None
        }
        """Prompts' token ids to show in a stream, by the index of their first choice, which shows them once."""
        self.text_only = not self._unshown
        self._id = f"cmpl-{new_id()}"
        self._created = int(time.time())
        self._fingerprint = system_fingerprint(model)

    def logprobs(self, tokens: list[Token]) -> CompletionLogprobs | None:
        top = self._fields.logprobs
        return None if top is None else _logprobs(self._texts, tokens, top, self._gamma)

    def chosen(self, choices: list[Piece], generations: list[Generation], /) -> list[Piece]:
        if not self._fields.is_choosy:
            return choices
        means = {
            sequence.index: sequence.logprob / max(1, sequence.completion_tokens)
            for generation in generations
            for sequence in generation.sequences
        }
        drawn, wanted = self._fields.sequences, self._fields.completions
        best: list[Piece] = []
        for begin in range(0, len(choices), drawn):
            ranked = sorted(choices[begin : begin + drawn], key=lambda piece: means[piece.index], reverse=True)
            best += ranked[:wanted]
        for index, piece in enumerate(best):
            piece.index = index
        return best

    def whole(
        self, choices: list[Piece], logprobs: list[CompletionLogprobs | None], usage: Usage, prompts: list[PromptOutput]
    ) -> Completion:
        told = [self._choice(piece, logprobs) for piece, logprobs in zip(choices, logprobs, strict=True)]
        for choice, prompt in zip(told[:: self._fields.completions], prompts, strict=True):
            choice.prompt_token_ids, choice.prompt_logprobs = prompt.token_ids, prompt.logprobs
        return self._completion(told, usage)

    def chunk(self, piece: Piece, usage: Usage | None) -> Completion:
        choice = self._choice(piece, self.logprobs(piece.tokens))
        if self._unshown and (ids := self._unshown.pop(piece.index, None)) is not None:
            choice.prompt_token_ids, self.text_only = ids, not self._unshown
        return self._completion([choice], usage)

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

    def _choice(self, piece: Piece, logprobs: CompletionLogprobs | None) -> CompletionChoice:
        choice = CompletionChoice(index=piece.index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish)
        if self._fields.return_token_ids:
            choice.token_ids = piece.token_ids
        return choice


def _logprobs(texts: Mapping[int, str], tokens: list[Token], top: int, gamma: float | None) -> CompletionLogprobs:
    """Convert ``tokens`` to lists, with the ``top`` most probable tokens at each position. Tokens with equal text (parts of
    characters) share an entry of ``top_logprobs``; the more probable one keeps it."""
    told = CompletionLogprobs()
    if gamma is not None:
        values = [{texts[id]: token.values[id] for id, _ in token.top[::-1] if id in token.values} for token in tokens]
        told.top_values = [row or None for row in values]
        told.top_remaining_tokens = [
            {text: remaining_tokens(value, gamma) for text, value in row.items()} or None for row in values
        ]
    for token in tokens:
        text = texts[token.id]
        told.tokens.append(text)
        told.token_logprobs.append(token.logprob)
        told.text_offset.append(token.offset)
        if token.logprob is None:
            told.top_logprobs.append(None)
            continue
        ranked = [*((texts[id], logprob) for id, logprob in token.top[:top]), (text, token.logprob)]
        told.top_logprobs.append(dict(sorted(ranked, key=lambda entry: entry[1])))
    return told
