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
    """What the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; without it the function has no parameters."""
    strict: bool | None = None
    """The arguments of every call match `parameters` exactly."""


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, most of which need parameters."""
        given = self.function
        described = {} if given.description is None else {"description": given.description}
        parameters = given.parameters or {"type": "object", "properties": {}}
        return {"type": self.type, "function": {"name": given.name, **described, "parameters": parameters}}


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct):
    """The function that must be called."""

    name: str


class NamedTool(msgspec.Struct):
    """Call this tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(msgspec.Struct):
    """The function of an earlier tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """The arguments as JSON text, or as an object."""


class EarlierCall(msgspec.Struct):
    """A tool call of an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"

    def for_template(self) -> dict[str, Any]:
        """Return the call for chat templates, which take arguments as an object. A text that is no JSON object stays a text."""
        call = {"type": self.type, "function": {"name": self.function.name, "arguments": self._arguments()}}
        return call if self.id is None else {"id": self.id} | call

    def _arguments(self) -> Any:
        given = self.function.arguments
        if not isinstance(given, str):
            return given or {}
        try:
            return msgspec.json.decode(given, type=dict[str, Any]) if given.strip() else {}
        except msgspec.DecodeError:
            return given


class CalledFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The function of a tool call; in a stream, what is new of it."""

    name: str | None = None
    arguments: str | None = None
    """The arguments as JSON text. The model wrote it: without `strict`, it may be invalid."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of the answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a tool call. The first delta of each call has its id, its type and the function's name."""

    index: int
    """Position of the call in the answer."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | None = None
