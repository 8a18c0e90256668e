"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from gateway.errors import InvalidRequest
from gateway.generation.plan import check, plan
from gateway.generation.sequence import Piece, Token
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.routes.access import requested_model
from gateway.routes.body import post_json
from gateway.routes.generating import Answer, Generator
from gateway.routes.tokens import check_ids, tokenised
from gateway.schemas.completions import MAX_PROMPTS, Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from gateway.schemas.usage import Usage
from gateway.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


def completion_route(pool: Pool, generator: Generator) -> HTTPRouteHandler:
    """The endpoint."""

    @post_json("/v1/completions", CompletionRequest, "generation")
    async def complete(request: Request[Any, Any, Any], data: JSONBody[CompletionRequest]) -> Response[Completion]:
        """Continue prompts.

        With `stream` the answer is a stream of server-sent events, each a completion with what is new, and `[DONE]` at the end.
        """
        model = requested_model(request, pool, data.model)
        _check(model, data)
        generations = [
            plan(
                model,
                data,
                ids,
                max_tokens=DEFAULT_MAX_TOKENS if data.max_tokens is None else data.max_tokens,
                logprobs=data.logprobs,
                first_index=index * data.sequences,
                echo=text if data.echo else None,
                param=param,
            )
            for index, (param, text, ids) in enumerate(await _prompts(model, data))
        ]
        answer = CompletionAnswer(model, logprobs=data.logprobs is not None)
        return await generator.respond(request, generations, answer, stream=bool(data.stream), includes_usage=data.includes_usage)

    return complete


def _check(model: ServedModel, data: CompletionRequest) -> None:
    check(model, data, logprobs=data.logprobs)
    if data.best_of is not None and data.best_of != data.sequences:
        raise InvalidRequest("`best_of` other than `n` is not supported; ask for `n` completions and choose.", param="best_of")
    if data.suffix:
        raise InvalidRequest("`suffix` is not supported: these models only continue a text.", param="suffix")
    if data.max_tokens == 0 and not data.echo:
        raise InvalidRequest("`max_tokens` is 0, which only makes sense with `echo`.", param="max_tokens")


async def _prompts(model: ServedModel, data: CompletionRequest) -> list[tuple[str, str, list[int]]]:
    """Where each prompt stands in the request, its text, its tokens."""
    given = data.prompt
    if isinstance(given, str):
        return [("prompt", given, await tokenised(len(given), model.tokenizer.encode, given))]
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    ids = [prompt for prompt in given if isinstance(prompt, int)]
    lists = [prompt for prompt in given if isinstance(prompt, list)]
    if len(given) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequest("`prompt` mixes kinds; give texts, or token ids, or lists of token ids.", param="prompt")
    if ids:
        return [_from_ids(model, "prompt", ids)]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"`prompt` has {len(given)} prompts; at most {MAX_PROMPTS} are answered at once.", param="prompt")
    if texts:
        batches = await tokenised(sum(map(len, texts)), model.tokenizer.encode_batch, texts)
        encoded = zip(texts, batches, strict=True)
        return [(f"prompt[{index}]", text, tokens) for index, (text, tokens) in enumerate(encoded)]
    return [_from_ids(model, f"prompt[{index}]", tokens) for index, tokens in enumerate(lists)]


def _from_ids(model: ServedModel, param: str, ids: list[int]) -> tuple[str, str, list[int]]:
    check_ids(model, ids, param)
    return param, model.tokenizer.decode(ids, skip_special_tokens=False), ids


class CompletionAnswer(Answer):
    """Bodies of this endpoint."""

    def __init__(self, model: ServedModel, *, logprobs: bool) -> None:
        self._model = model
        self._logprobs = logprobs
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, choices: list[Piece], usage: Usage) -> Completion:
        return self._completion([self._choice(piece) for piece in choices], usage)

    def chunk(self, piece: Piece) -> Completion:
        return self._completion([self._choice(piece)])

    def opening(self, _: int, /) -> None:
        return None

    def closing(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model.name, choices=choices, usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = _logprobs(self._model.tokenizer, piece.tokens) if self._logprobs else None
        return CompletionChoice(index=piece.index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish)


def _logprobs(tokenizer: Tokenizer, tokens: list[Token]) -> CompletionLogprobs:
    """Tokens of the same text (parts of characters) share an entry of ``top_logprobs``; the more probable one has it."""
    told = CompletionLogprobs()
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
