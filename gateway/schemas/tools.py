"""Tools in requests and tool calls in answers, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

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
        except msgspec.DecodeError:
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
