"""``/v1/chat/completions``: route, answer and chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from yardstick_llm.gateway.api.access import caller_of, priority_of, requested_model
from yardstick_llm.gateway.api.generation import Answer, Generator, system_fingerprint
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.generation import TOKEN_IDS, PromptOutput, prompt_ids
from yardstick_llm.gateway.generation.length import (
    gamma_of_values,
    guidance_of,
    remaining_tokens,
    require_lenvm,
    thinking_limit,
    with_section,
)
from yardstick_llm.gateway.generation.plan import check, plan
from yardstick_llm.gateway.generation.sequence import Piece, Token
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.output.parser import Call, CallArguments, CallBegin, Content, Part, Reasoning, joined
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.schemas.chat import (
    AssistantMessage,
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    CustomToolCall,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from yardstick_llm.gateway.schemas.common import Usage, new_id
from yardstick_llm.gateway.schemas.generation import LengthGuidance

_encoder = msgspec.json.Encoder()


def _finish_reason(piece: Piece) -> Literal["stop", "length", "tool_calls"] | None:
    return "tool_calls" if piece.calls and piece.finish == "stop" else piece.finish


def _message(piece: Piece) -> AssistantMessage:
    """Return the message of a whole answer."""
    if piece.parts is None:
        return AssistantMessage(content=piece.text)
    parts = joined(piece.parts)
    message = AssistantMessage(content=parts.content if parts.content or not parts.calls else None)
    if parts.reasoning:
        message.reasoning_content = message.reasoning = parts.reasoning
    if parts.calls:
        message.tool_calls = [*map(_tool_call, parts.calls)]
    return message


def _tool_call(call: Call) -> ToolCall | CustomToolCall:
    if call.custom:
        return CustomToolCall(id=call.id, custom=CalledCustom(name=call.name, input=call.arguments))
    return ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def _delta(parts: list[Part]) -> ChatDelta | None:
    """Return what is new in a chunk; None if there is nothing."""
    if not parts:
        return None
    content, reasoning = "", ""
    calls: dict[int, ToolCallDelta] = {}
    texts: dict[int, str] = {}
    for part in parts:
        match part:
            case Content():
                content += part.text
            case Reasoning():
                reasoning += part.text
            case CallBegin():
                texts[part.call] = ""
                calls[part.call] = _call_delta(part.call, part.name, custom=part.custom)
                calls[part.call].id = part.id
            case CallArguments():
                texts[part.call] = texts.get(part.call, "") + part.text
                if part.call not in calls:
                    calls[part.call] = _call_delta(part.call, None, custom=part.custom)
    for call, delta in calls.items():
        if delta.custom is not None:
            delta.custom.input = texts[call]
        elif delta.function is not None:
            delta.function.arguments = texts[call]
    return ChatDelta(
        content=content or None,
        reasoning_content=reasoning or None,
        reasoning=reasoning or None,
        tool_calls=[*calls.values()] or None,
    )


def _call_delta(call: int, name: str | None, *, custom: bool) -> ToolCallDelta:
    """Return what is new of a call, without its text. ``name``: of a call that begins, else None."""
    delta = ToolCallDelta(index=call)
    if custom:
        delta.custom = CalledCustom(name=name)
    else:
        delta.function = CalledFunction(name=name)
    if name is not None:
        delta.type = "custom" if custom else "function"
    return delta


class ChatAnswer(Answer):
    """Builds the response bodies of this endpoint."""

    def __init__(self, model: ServedModel, fields: ChatRequest, prompt: list[int] | None, *, gamma: float | None) -> None:
        """``prompt``: token ids to show; None: none. ``gamma``: discount factor of the length values in log-probabilities; None if
        there are none."""
        self._logprobs = bool(fields.logprobs)
        self._prompt = prompt
        self._ids = bool(fields.return_token_ids)
        self._gamma = gamma
        self._id = f"chatcmpl-{new_id()}"
        self._created = int(time.time())
        self._name = model.name
        self._fingerprint = system_fingerprint(model)
        self._texts = TOKEN_IDS if fields.return_tokens_as_token_ids else model.tokenizer.texts
        self._spellings = model.tokenizer.spellings(skip_special_tokens=False)
        self._encoded = None if gamma is not None or fields.return_tokens_as_token_ids else model.tokenizer.encoded

    def logprobs(self, tokens: list[Token]) -> ChatLogprobs | None:
        return ChatLogprobs([self._token_logprob(token) for token in tokens]) if self._logprobs else None

    def whole(
        self, choices: list[Piece], logprobs: list[ChatLogprobs | None], usage: Usage, prompts: list[PromptOutput]
    ) -> ChatCompletion:
        (prompt,) = prompts
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._name,
            system_fingerprint=self._fingerprint,
            choices=[
                ChatChoice(
                    index=piece.index,
                    message=_message(piece),
                    logprobs=encoded,
                    finish_reason=_finish_reason(piece) or "stop",
                    token_ids=piece.token_ids if self._ids else msgspec.UNSET,
                )
                for piece, encoded in zip(choices, logprobs, strict=True)
            ],
            usage=usage,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=prompt.logprobs,
        )

    def chunk(self, piece: Piece, usage: Usage | None) -> ChatChunk | None:
        """The chunk has the log-probabilities of all tokens that were read with it, of thinking and tool calls too, and it is sent
        for them even if their text is held back."""
        delta = ChatDelta(content=piece.text or None) if piece.parts is None else _delta(piece.parts)
        logprobs = self.logprobs(piece.tokens) if self._logprobs else None
        if delta is None:
            if not piece.tokens and piece.finish is None and not piece.token_ids:
                return None
            delta = ChatDelta()
        choice = ChatChunkChoice(index=piece.index, delta=delta, logprobs=logprobs, finish_reason=_finish_reason(piece))
        if self._ids:
            choice.token_ids = piece.token_ids
        return self._chunk([choice], usage)

    def opening(self, index: int, usage: Usage | None, /) -> ChatChunk:
        chunk = self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))], usage)
        if self._prompt is not None and index == 0:
            chunk.prompt_token_ids = self._prompt
        return chunk

    def closing(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )

    def _token_logprob(self, token: Token) -> Any:
        """Return a :class:`TokenLogprob`, or the same as JSON."""
        logprob = token.logprob or 0.0
        if self._encoded is not None:
            return _as_json(self._encoded, token.id, logprob, token.top)
        if self._gamma is not None:
            tops = [TopLogprob(**self._judged(id, logprob, token.values)) for id, logprob in token.top]
            return TokenLogprob(**self._judged(token.id, logprob, token.values), top_logprobs=tops)
        texts, spellings = self._texts, self._spellings
        tops = [TopLogprob(token=texts[id], logprob=logprob, bytes=list(spellings[id])) for id, logprob in token.top]
        return TokenLogprob(token=texts[token.id], logprob=logprob, bytes=list(spellings[token.id]), top_logprobs=tops)

    def _judged(self, id: int, logprob: float, values: Mapping[int, float]) -> dict[str, Any]:
        assert self._gamma is not None
        value = values.get(id)
        remaining = None if value is None else remaining_tokens(value, self._gamma)
        spelling = list(self._spellings[id])
        return {"token": self._texts[id], "logprob": logprob, "bytes": spelling, "value": value, "remaining_tokens": remaining}


def _as_json(encoded: Mapping[int, tuple[bytes, bytes]], id: int, logprob: float, top: Sequence[tuple[int, float]]) -> msgspec.Raw:
    """Return a :class:`TokenLogprob` as JSON. Most of it depends on the token only, and is encoded once for each token."""
    own, *numbers = _encoder.encode([logprob, *[each for _, each in top]])[1:-1].split(b",")
    before, after = encoded[id]
    parts = [before, own, after, b',"top_logprobs":[']
    for (each, _), number in zip(top, numbers, strict=True):
        before, after = encoded[each]
        parts += (before, number, after, b"},")
    if top:
        parts[-1] = b"}"
    parts.append(b"]}")
    return msgspec.Raw(b"".join(parts))


def chat_route(pool: Pool, reader: Reader, generator: Generator) -> HTTPRouteHandler:
    """Create the route."""

    @post_json("/v1/chat/completions", "generation")
    async def chat(request: AnyRequest, data: JSONBody[Body[ChatRequest]]) -> Response[ChatCompletion]:
        """Answer a conversation.

        With `stream` the answer is a stream of server-sent events, each with the `delta` of an answer, and `[DONE]` at the end.
        """
        body = await reader.body(request, ChatRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model, falls_back=True)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        check(model, fields, logprobs=logprobs)
        if fields.top_logprobs and not fields.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        guidance = guidance_of(model, with_budget(model, fields), logprobs=logprobs)
        priority = priority_of(request, fields.priority)
        prepared = await body.read(model)
        guidance = with_section(guidance, prepared.format)
        generation = plan(
            model,
            fields,
            prepared,
            max_tokens=_max_tokens(fields),
            logprobs=logprobs,
            guidance=guidance,
            thinking_limit=thinking_limit(fields.thinking_token_budget, prepared.format),
            priority=priority,
            caller=caller_of(request, cache_salt=fields.cache_salt),
        )
        answer = ChatAnswer(model, fields, prompt_ids(generation, fields), gamma=gamma_of_values(model, guidance))
        return await generator.respond(request, [generation], answer, fields)

    return chat


def with_budget(model: ServedModel, data: ChatRequest) -> ChatRequest:
    """Return the request with its budget of thinking as length guidance. Raises :class:`InvalidRequest`."""
    if data.thinking_budget is None:
        return data
    require_lenvm(model, "thinking_budget")
    if data.length_guidance is not None or data.custom_params is not None:
        message = "`thinking_budget` is one of several fields that set the length of the text; send one of them."
        raise InvalidRequest(message, param="thinking_budget")
    guidance = LengthGuidance(target_length=data.thinking_budget, applies_to="thinking")
    return msgspec.structs.replace(data, length_guidance=guidance)


def _max_tokens(data: ChatRequest) -> int | None:
    limit = data.max_tokens if data.max_completion_tokens is None else data.max_completion_tokens
    if limit == 0:
        raise InvalidRequest("`max_completion_tokens` is 0; ask for at least one token.", param="max_completion_tokens")
    return limit
