"""Messages, tools and answers of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.schemas.common import ImagePart, MessagePart, Usage
from yardstick_llm.gateway.schemas.generation import MAX_LOGPROBS, Count, GenerationRequest, PromptLogprob
from yardstick_llm.gateway.schemas.parameters import EndpointName

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
"""Most bytes of a request's tools as JSON."""

FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call."""

    name: FunctionName
    """Up to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """Purpose of the function, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; without it the function has no parameters."""
    strict: bool | None = None
    """The arguments of every call match `parameters` exactly."""


class GrammarText(msgspec.Struct):
    """A grammar and its syntax."""

    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct):
    """The format of the text that a custom tool takes."""

    type: Literal["text", "grammar"]
    """`text`: any text; `grammar`: a text of `grammar`."""
    grammar: GrammarText | None = None
    """Only with the type `grammar`."""

    def __post_init__(self) -> None:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("`grammar` belongs to the type `grammar`")


class CustomDefinition(msgspec.Struct):
    """A tool that takes a text instead of arguments."""

    name: FunctionName
    """Up to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """Purpose of the tool, for the model."""
    format: CustomFormat | None = None
    """Format of the text; any text by default."""


CUSTOM_INPUT = "input"
"""The parameter by which models, whose chat templates know functions only, give a custom tool its text."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


class FunctionTool(msgspec.Struct, tag_field="type", tag="function"):
    """A function that the model may call."""

    function: FunctionDefinition

    @property
    def name(self) -> str:
        """The name that the model calls."""
        return self.function.name

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, most of which need parameters."""
        given = self.function
        return _shown(given.name, given.description, given.parameters or {"type": "object", "properties": {}})


class CustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """A tool that takes a text, which the model may call."""

    custom: CustomDefinition

    @property
    def name(self) -> str:
        """The name that the model calls."""
        return self.custom.name

    @property
    def grammar(self) -> GrammarText | None:
        """The grammar of its text; None for any text."""
        return None if self.custom.format is None else self.custom.format.grammar

    @property
    def parameters(self) -> dict[str, Any]:
        """Schema of the arguments with which models call it."""
        return _CUSTOM_PARAMETERS

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, as a function with one parameter. Its description has the grammar."""
        described = self.custom.description or ""
        if self.grammar is not None:
            described += f"\n\nThe input must match this {self.grammar.syntax} grammar:\n{self.grammar.definition}"
        return _shown(self.custom.name, described.strip() or None, _CUSTOM_PARAMETERS)


def _shown(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


Tool = FunctionTool | CustomTool
Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct):
    """The name of a tool."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """Call this function."""

    function: NamedFunction

    @property
    def name(self) -> str:
        """The name of the tool."""
        return self.function.name


class NamedCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """Call this custom tool."""

    custom: NamedFunction

    @property
    def name(self) -> str:
        """The name of the tool."""
        return self.custom.name


class Allowed(msgspec.Struct):
    """Some of the request's tools."""

    mode: Literal["auto", "required"]
    """`auto`: the model may call one of them; `required`: it calls at least one."""
    tools: Annotated[list[NamedTool | NamedCustomTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """The model sees all tools and can call only these."""

    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools


class FunctionCall(msgspec.Struct):
    """The function of an earlier tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """The arguments as JSON text, or as an object."""


class CustomCall(msgspec.Struct):
    """The custom tool of an earlier call."""

    name: str
    input: str
    """The text that the tool was given."""


class EarlierCall(msgspec.Struct):
    """A tool call of an earlier answer, with `function` or `custom`."""

    function: FunctionCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    custom: CustomCall | None = None

    def __post_init__(self) -> None:
        if (self.function if self.type == "function" else self.custom) is None:
            raise ValueError(f"A tool call of the type `{self.type}` needs `{self.type}`")

    def for_template(self) -> dict[str, Any]:
        """Return the call for chat templates, which take arguments as an object. A text that is no JSON object stays a text."""
        name, arguments = self._function()
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id} | call

    def _function(self) -> tuple[str, Any]:
        """Return the name and the arguments; those of a custom tool are its text."""
        if self.type == "custom":
            assert self.custom is not None
            return self.custom.name, {CUSTOM_INPUT: self.custom.input}
        assert self.function is not None
        given = self.function.arguments
        if not isinstance(given, str):
            return self.function.name, given or {}
        try:
            return self.function.name, msgspec.json.decode(given, type=dict[str, Any]) if given.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            return self.function.name, given


class CalledFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The function of a tool call; in a stream, what is new of it."""

    name: str | None = None
    arguments: str | None = None
    """The arguments as JSON text. The model wrote it: without `strict`, it may be invalid."""


class CalledCustom(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The custom tool of a call; in a stream, what is new of it."""

    name: str | None = None
    input: str | None = None
    """The text that the model gives the tool."""


class ToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A call of a function in the answer."""

    id: str
    function: CalledFunction


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool in the answer."""

    id: str
    custom: CalledCustom


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The new part of a tool call. The first delta of each call has its id, its type and the tool's name."""

    index: int
    """Position of the call in the answer."""
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ChatMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Author of the message; `developer` is treated as `system`."""
    content: str | list[MessagePart] | None = None
    """A text, or parts of the types `text`, `image_url` and `refusal`."""
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    """Tool calls of an earlier answer."""
    tool_call_id: str | None = None
    """The call that a message of the role `tool` answers."""
    reasoning_content: str | None = None
    """The thinking section of an earlier answer, for the model's chat template."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    function_call: None = None
    """Not supported; send `tool_calls`."""

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates, without absent fields."""
        content = [_part(part) for part in self.content] if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        thinking = self.reasoning if self.reasoning_content is None else self.reasoning_content
        extras = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thinking,
        }
        return message | {key: value for key, value in extras.items() if value is not None}


def _part(part: MessagePart) -> dict[str, str]:
    """Return a part for chat templates, in the form of transformers."""
    return {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatReasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether and how much the model thinks, in the form of OpenRouter."""

    effort: ReasoningEffort | None = None
    """See `reasoning_effort`."""
    enabled: bool | None = None
    """See `enable_thinking`. False overrides `effort`; true needs no `effort`."""
    exclude: bool | None = None
    """True means `include_reasoning` false."""


class ChatThinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks, in the form of Z.AI, DeepSeek and Kimi."""

    type: Literal["enabled", "disabled"]
    """See `enable_thinking`. `disabled` overrides `reasoning_effort`; `enabled` needs none."""
    clear_thinking: bool | None = None
    """Not used: the chat template decides whether it shows the thinking sections of earlier answers."""


class ChatRequest(GenerationRequest, kw_only=True):
    """Answer a conversation."""

    endpoint: ClassVar[EndpointName] = "chat"
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: Count | None = None
    """Most tokens of each answer; unless given, only the context limits it."""
    logprobs: bool | None = False
    """Return the log-probability of each token of the answer."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of most probable tokens to return at each position, with their log-probabilities; only with `logprobs`."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of the answer; true unless `continue_final_message` is set."""
    continue_final_message: bool | None = False
    """End the prompt within the last message, so that the answer continues its text."""
    add_special_tokens: bool | None = False
    """Add the special tokens, such as BOS, that the tokeniser adds to a text, to those of the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's chat template."""
    tools: Tools | None = None
    """Functions and custom tools that the model may call; up to 128."""
    tool_choice: ToolChoice | None = None
    """`auto`, the default: the model decides. `none`: it sees no tools. `required`: it calls at least one. An object with the name
    of a tool: it calls that one. An object of the type `allowed_tools`: it can call these only."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may have several tool calls; true by default."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model thinks, where its chat template reads this; `none` switches thinking off."""
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers, where its chat template reads this."""
    reasoning: ChatReasoning | None = None
    """`reasoning_effort`, `enable_thinking` and `include_reasoning` in the form of OpenRouter."""
    thinking: ChatThinking | None = None
    """`enable_thinking` in the form of Z.AI, DeepSeek and Kimi."""
    thinking_budget: Count | None = None
    """Tokens of the thinking section, about; only with a model that has a length model. Short for `length_guidance` with
    `target_length` and `applies_to` "thinking", with `min_p` 0.1 by default."""
    thinking_token_budget: Count | None = None
    """Most tokens of the thinking section: there the closing tag is forced. Needs no length model."""
    include_reasoning: bool | None = True
    """Return the thinking section."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its log-probability."""

    token: str
    """The token as text; a token that is only part of a character reads like `bytes:\\xe2\\x82`."""
    logprob: float
    """-9999 represents a probability of zero."""
    bytes: list[int]
    """The token's UTF-8 bytes."""
    value: float | msgspec.UnsetType | None = msgspec.UNSET
    """Only with `length_guidance.return_values`: the length model's value after this token, from 0 (the text ends) to 1. Null if
    this token was drawn without guidance."""
    remaining_tokens: float | msgspec.UnsetType | None = msgspec.UNSET
    """The value in tokens, approximately: a proxy that lies below the mean."""


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the answer's tokens, over the whole vocabulary at temperature 1; with length guidance, over the
    candidates of each draw."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null if the answer consists of tool calls only."""
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The thinking section, if there is one."""
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """`reasoning_content` under its other name."""
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New output of an answer."""

    role: Literal["assistant"] | None = None
    """Only in the first chunk of an answer."""
    content: str | None = None
    reasoning_content: str | None = None
    """New text of the thinking section."""
    reasoning: str | None = None
    """`reasoning_content` under its other name."""
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`stop`: the model or a stop text ended the answer; `tool_calls`: the same, and it has tool calls; `length`: the limit or the
    context was reached."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the answer's tokens; only with `return_token_ids`."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Identifies the weights and the settings that affect numbers. While it stays the same, equal requests with a seed get equal
    answers."""
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the prompt's tokens; only with `return_token_ids`."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only with `prompt_logprobs`: for each token of the prompt, the log-probabilities of the token and of the most probable ones
    at its position, by token id. Null for the first token."""


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the new tokens; only with `return_token_ids`."""


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the prompt's tokens, in the first chunk; only with `return_token_ids`."""
