"""Requests, answers and events of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.schemas.chat import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    ReasoningEffort,
    TokenLogprob,
)
from yardstick_llm.gateway.schemas.generation import MAX_LOGPROBS, TextRequest
from yardstick_llm.gateway.schemas.parameters import EndpointName

MAX_ITEMS = 4096
"""Most items of a request. The event loop decodes as many of a stored response, which takes 3 ms."""

Status = Literal["in_progress", "completed", "incomplete"]


class ItemPart(msgspec.Struct, omit_defaults=True):
    """A part of a message, of a tool's output or of a reasoning item. Only text is supported."""

    type: Literal[
        "input_text",
        "output_text",
        "text",
        "summary_text",
        "reasoning_text",
        "refusal",
        "input_image",
        "input_file",
        "input_audio",
    ]
    """Images, files and audio are refused."""
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    """Part of outputs; not used."""
    logprobs: list[Any] | None = None
    """Part of outputs; not used."""


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation. Items of earlier outputs can be sent as they are."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    ] = "message"
    """An `item_reference` is refused; send the item itself."""
    id: str | None = None
    status: Status | None = None
    """Part of outputs; not used."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Author of a message."""
    content: str | list[ItemPart] | None = None
    """Text of a message, or parts of a message or of a reasoning item."""
    call_id: str | None = None
    """Connects a `function_call` and its `function_call_output`, or a `custom_tool_call` and its `custom_tool_call_output`."""
    name: str | None = None
    """Tool of a `function_call` or `custom_tool_call`."""
    namespace: str | None = None
    """Namespace of this tool, if it has one."""
    arguments: str | None = None
    """Arguments of a `function_call`, as JSON text."""
    input: str | None = None
    """Text of a `custom_tool_call`."""
    output: str | list[ItemPart] | None = None
    """Result in a `function_call_output` or `custom_tool_call_output`."""
    summary: list[ItemPart] | None = None
    """Part of reasoning items; not used."""
    encrypted_content: str | None = None
    """Part of reasoning items of other servers; not used. This server returns the reasoning itself in `content`."""
    phase: str | None = None
    """Part of messages of other servers; not used."""


class FunctionTool(FunctionDefinition, tag_field="type", tag="function"):
    """A function that the model may call."""


class InputFormat(msgspec.Struct, omit_defaults=True):
    """The format of the text that a custom tool takes."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    """Only with the type `grammar`."""
    definition: str | None = None
    """The grammar; only with the type `grammar`."""

    def __post_init__(self) -> None:
        if [self.type == "grammar"] * 2 != [self.syntax is not None, self.definition is not None]:
            raise ValueError("`syntax` and `definition` belong to the type `grammar`")


class CustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """A tool that takes a text, which the model may call."""

    name: FunctionName
    """Up to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """Purpose of the tool, for the model."""
    format: InputFormat | None = None
    """Format of the text; any text by default."""


class Namespace(msgspec.Struct, tag_field="type", tag="namespace"):
    """Tools with a common prefix, as Codex sends those of an MCP server. The model sees `NAMESPACE__TOOL`."""

    name: FunctionName
    """Up to 64 letters, digits, `_` and `-`."""
    tools: Annotated[list[FunctionTool | CustomTool], msgspec.Meta(max_length=MAX_TOOLS)]
    description: str | None = None
    """Accepted for compatibility and not used."""


AnyTool = FunctionTool | CustomTool | Namespace


class ChosenFunction(NamedFunction, tag_field="type", tag="function"):
    """Call this function."""


class ChosenCustom(NamedFunction, tag_field="type", tag="custom"):
    """Call this custom tool."""


class ChosenTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """The model sees all tools and can call only these."""

    mode: Literal["auto", "required"]
    """`auto`: the model may call one of them; `required`: it calls at least one."""
    tools: Annotated[list[ChosenFunction | ChosenCustom], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


Choice = Literal["none", "auto", "required"] | ChosenFunction | ChosenCustom | ChosenTools


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    """Name of the schema; only with `json_schema`."""
    schema: dict[str, Any] | None = None
    """The schema; only with `json_schema`."""
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Only `medium`, which changes nothing; `length_guidance` steers the length."""


class Reasoning(msgspec.Struct):
    """Options of reasoning."""

    effort: ReasoningEffort | None = None
    """How much the model thinks, where its chat template reads this; `none` switches thinking off."""
    summary: Literal["auto", "detailed"] | None = None
    """Also return the text of reasoning items as `summary`, whole: nothing shortens it."""
    generate_summary: Literal["auto", "detailed"] | None = None
    """The older name of `summary`."""


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)
]


class ResponseRequest(TextRequest, kw_only=True):
    """Answer a conversation of items."""

    endpoint: ClassVar[EndpointName] = "responses"
    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_ITEMS)]
    """A text, or items: messages, function calls, their outputs, and reasoning. Images, audio and files are not supported."""
    instructions: str | None = None
    """A system message before the conversation. It is not part of what `previous_response_id` continues."""
    previous_response_id: str | None = None
    """Continue the conversation of a stored response: its items come before those of `input`."""
    store: bool | None = False
    """Keep the response for `previous_response_id` and for `GET /v1/responses/{id}`. Unlike OpenAI's, the default is false."""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Most tokens of the answer, with reasoning; unless given, only the context limits it."""
    include: list[Include] | None = None
    """`message.output_text.logprobs` returns the log-probability of each token. `reasoning.encrypted_content` has no effect."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of most probable tokens to return at each position; only with `include`."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` leaves out the oldest items of a conversation that is too long; by default such a conversation is an error."""
    tools: Annotated[list[AnyTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    """Functions and custom tools that the model may call, also in namespaces; up to 128. Tools of other types are not supported."""
    tool_choice: Choice | None = None
    """`auto`, the default: the model decides. `none`: it sees no tools. `required`: it calls at least one. An object with the name
    of a tool: it calls that one. An object of the type `allowed_tools`: it can call these only."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may have several function calls; true by default."""
    thinking_budget: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    """Tokens of the reasoning, about; only with a model that has a length model. See /v1/chat/completions."""
    text: TextConfig | None = None
    """Format of the text."""
    reasoning: Reasoning | None = None
    """Options of reasoning."""
    metadata: Metadata | None = None
    """Up to 16 texts by name, which the response repeats."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's chat template."""

    @property
    def includes_logprobs(self) -> bool:
        """Whether log-probabilities were requested."""
        return "message.output_text.logprobs" in (self.include or ())


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
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The function's namespace, if it has one."""
    arguments: str
    """The arguments as JSON text. The model wrote it: without `strict`, it may be invalid."""


class OutputCustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. The caller runs the tool and sends a `custom_tool_call_output` with the same `call_id`."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The tool's namespace, if it has one."""
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
    tools: list[AnyTool] = []
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


class OfItem(msgspec.Struct, kw_only=True):
    """An event of one item of the output."""

    sequence_number: int
    item_id: str
    output_index: int


class ContentEvent(OfItem, kw_only=True):
    """An event of an item's only part."""

    content_index: int = 0


class SummaryEvent(OfItem, kw_only=True):
    """An event of the only part of a reasoning item's summary."""

    summary_index: int = 0


class PartEvent(ContentEvent, kw_only=True):
    """A part of a message or of a reasoning item begins or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDelta(ContentEvent, kw_only=True):
    """New text of a message."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(ContentEvent, kw_only=True):
    """The whole text of a message."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(ContentEvent, kw_only=True):
    """New text of a reasoning item."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    delta: str


class ReasoningDone(ContentEvent, kw_only=True):
    """The whole text of a reasoning item."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    text: str


class SummaryPart(SummaryEvent, kw_only=True):
    """The summary of a reasoning item begins or is complete."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: SummaryText


class SummaryDelta(SummaryEvent, kw_only=True):
    """Text of a summary."""

    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    delta: str


class SummaryDone(SummaryEvent, kw_only=True):
    """The whole text of a summary."""

    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    text: str


class ArgumentsDelta(OfItem, kw_only=True):
    """New characters of a function call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDone(OfItem, kw_only=True):
    """All arguments of a function call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


class InputDelta(OfItem, kw_only=True):
    """New text for a custom tool."""

    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class InputDone(OfItem, kw_only=True):
    """The whole text for a custom tool."""

    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str


Calls = ArgumentsDelta | ArgumentsDone | InputDelta | InputDone
Thoughts = ReasoningDelta | ReasoningDone | SummaryPart | SummaryDelta | SummaryDone
Event = StateEvent | ItemEvent | PartEvent | TextDelta | TextDone | Thoughts | Calls
