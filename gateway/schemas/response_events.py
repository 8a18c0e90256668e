"""Events of streamed responses. Each has a number; the numbers of a stream count from 0."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.schemas.chat import TokenLogprob
from gateway.schemas.response_body import OutputItem, OutputText, ReasoningText, ResponseBody, SummaryText


class StateEvent(msgspec.Struct, kw_only=True):
    """The response as a whole: at its beginning and at its end."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"]
    sequence_number: int
    response: ResponseBody


class ItemEvent(msgspec.Struct, kw_only=True):
    """An item of the output begins or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, kw_only=True):
    """A part of a message or of a reasoning item begins or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(msgspec.Struct, kw_only=True):
    """New text of a message."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(msgspec.Struct, kw_only=True):
    """The whole text of a message."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(msgspec.Struct, kw_only=True):
    """New text of a reasoning item."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(msgspec.Struct, kw_only=True):
    """The whole text of a reasoning item."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class SummaryPart(msgspec.Struct, kw_only=True):
    """The summary of a reasoning item begins or is complete."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int = 0
    part: SummaryText


class SummaryDelta(msgspec.Struct, kw_only=True):
    """Text of a summary."""

    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int = 0
    delta: str


class SummaryDone(msgspec.Struct, kw_only=True):
    """The whole text of a summary."""

    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int = 0
    text: str


class ArgumentsDelta(msgspec.Struct, kw_only=True):
    """New characters of a function call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, kw_only=True):
    """All arguments of a function call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDelta(msgspec.Struct, kw_only=True):
    """New text for a custom tool."""

    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class InputDone(msgspec.Struct, kw_only=True):
    """The whole text for a custom tool."""

    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    sequence_number: int
    item_id: str
    output_index: int
    input: str


Calls = ArgumentsDelta | ArgumentsDone | InputDelta | InputDone
Thoughts = ReasoningDelta | ReasoningDone | SummaryPart | SummaryDelta | SummaryDone
Event = StateEvent | ItemEvent | PartEvent | TextDelta | TextDone | Thoughts | Calls
