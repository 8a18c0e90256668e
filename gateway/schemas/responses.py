"""Requests of ``/v1/responses``, with the items of their input, as in OpenAI's API. ``response_body.py`` has the answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.schemas.generation import MAX_LOGPROBS, TextRequest
from gateway.schemas.parameters import EndpointName
from gateway.schemas.tools import MAX_TOOLS, FunctionName

MAX_ITEMS = 4096
"""Most items of a request. The event loop decodes as many of a stored response, which takes 3 ms."""

Status = Literal["in_progress", "completed", "incomplete"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


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


class FunctionTool(msgspec.Struct, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: FunctionName
    """Up to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """Purpose of the function, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object."""
    strict: bool | None = None
    """The arguments of every call match `parameters` exactly."""


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


class ChosenFunction(msgspec.Struct, tag_field="type", tag="function"):
    """Call this function."""

    name: str


class ChosenCustom(msgspec.Struct, tag_field="type", tag="custom"):
    """Call this custom tool."""

    name: str


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

    effort: Effort | None = None
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
    tools: Annotated[list[FunctionTool | CustomTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    """Functions and custom tools that the model may call; up to 128. Tools of other types are not supported."""
    tool_choice: Choice | None = None
    """`auto`, the default: the model decides. `none`: it sees no tools. `required`: it calls at least one. An object with the name
    of a tool: it calls that one. An object of the type `allowed_tools`: it can call these only."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may have several function calls; true by default."""
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
