"""Bodies of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.schemas.generation import MAX_LOGPROBS, Count, GenerationRequest
from gateway.schemas.parameters import Endpoint
from gateway.schemas.usage import Usage


class TextPart(msgspec.Struct):
    """A piece of a message."""

    type: Literal["text"]
    """Only text is supported."""
    text: str


class ChatMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; `developer` is the same as `system`."""
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Of an earlier answer; handed to the model's chat template."""
    tool_call_id: str | None = None
    function_call: None = None
    """Not supported; send `tool_calls`."""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: absent fields left out."""
        content = msgspec.to_builtins(self.content) if self.content is not None else ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        extras = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in extras.items() if value is not None}


class ChatRequest(GenerationRequest, kw_only=True):
    """Answer a conversation."""

    endpoint: ClassVar[Endpoint] = "chat"
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: Count | None = None
    """Tokens of each answer at most; up to the end of the context unless given."""
    logprobs: bool | None = False
    """Return the log-probability of each token of the answer."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """And of this many most probable ones at its place; only with `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the model's chat template."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its log-probability."""

    token: str
    """As text; one that is only a part of a character reads like `bytes:\\xe2\\x82`."""
    logprob: float
    """-9999 stands for a probability of zero."""
    bytes: list[int]
    """Its UTF-8 bytes."""
    value: float | msgspec.UnsetType | None = msgspec.UNSET
    """Only with `length_guidance.return_values`: the length model's value after this token, from 0 (the text ends) to 1. Null where
    this draw was not steered."""
    remaining_tokens: float | msgspec.UnsetType | None = msgspec.UNSET
    """And about how many tokens that is, a proxy that lies below the mean."""


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A token of the answer, and the most probable ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the answer's tokens, over the whole vocabulary at temperature 1; with length guidance, over the
    candidates that each token was drawn from."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    """Only in the first chunk of an answer."""
    content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    """`stop`: the model or a stop text ended it; `length`: the limit or the context is reached."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Identifies the weights and the settings that change numbers; with a seed, equal requests get equal answers while it is the
    same."""
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
