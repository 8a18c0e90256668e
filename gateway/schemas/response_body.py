"""Answers of ``/v1/responses``, with the items of their output, as in OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.schemas.chat import TokenLogprob
from gateway.schemas.responses import Choice, CustomTool, FunctionTool, InputItem, Reasoning, Status, TextConfig


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    """Always empty."""
    logprobs: list[TokenLogprob] = []
    """Log-probability of each token, as in chat completions, if requested."""


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """Text of a reasoning item, as its summary."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The thinking section of the answer."""

    id: str
    status: Status
    summary: list[SummaryText] = []
    """The text, if `reasoning.summary` asks for it."""
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function call. The caller runs the function and sends a `function_call_output` with the same `call_id`."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    """The arguments as JSON text. The model wrote it: without `strict`, it may be invalid."""


class OutputCustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. The caller runs the tool and sends a `custom_tool_call_output` with the same `call_id`."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    """The text that the model gives the tool."""


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the input tokens."""

    cached_tokens: int
    """Input tokens that were not computed, because their keys and values were cached."""
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the output tokens."""

    reasoning_tokens: int
    """Tokens of the thinking section."""


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseBody(msgspec.Struct, kw_only=True):
    """The answer to a conversation, and the parameters that it was made with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """`incomplete`: the limit or the context was reached."""
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning
    store: bool
    """Whether the response can be retrieved."""
    temperature: float
    text: TextConfig
    tool_choice: Choice = "auto"
    tools: list[FunctionTool | CustomTool] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    system_fingerprint: str
    """Identifies the weights and the settings that affect numbers."""


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """Input items of a stored response."""

    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
