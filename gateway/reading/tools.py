"""The tools of a chat request: which of them the model sees, which it may call, and what a grammar has to guarantee."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.errors import InvalidRequest
from gateway.output.answer import Calls, Tools
from gateway.output.constraint import REGEX_START, GrammarTextError, OutputConstraint, constraint_of, grammar_of
from gateway.output.families import FAMILIES, Function, is_text
from gateway.output.lark import quoted
from gateway.reading.endpoint import Model
from gateway.reading.structure import compiled
from gateway.schemas.chat import ChatRequest
from gateway.schemas.tools import (
    MAX_TOOLS_BYTES,
    AllowedTools,
    CustomTool,
    FunctionDefinition,
    FunctionTool,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolChoice,
)

_ANYTHING = {"type": "object"}
_ABOUT_NO_PARAMETER = {"type", "properties", "required", "title", "description", "$schema", "$id", "$defs", "definitions"}
"""Keywords of a schema of arguments that allow no parameter, if ``properties`` has none."""
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def offered_tools(request: ChatRequest, model: Model) -> list[Tool]:
    """Return the tools that the model sees: none with the choice ``none``. Raises :class:`InvalidRequest`."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
        return []
    check_tools(request.tools, model)
    if choice == "none":
        return []
    given = {tool.name: tool for tool in request.tools}
    for named in _named(choice):
        if not isinstance(given.get(named.name), FunctionTool if isinstance(named, NamedTool) else CustomTool):
            message = f"`tool_choice`: there is no tool {named.name[:64]!r} of this type in `tools`."
            raise InvalidRequest(message, param="tool_choice")
    return request.tools


def _named(choice: ToolChoice | None) -> Sequence[NamedTool | NamedCustomTool]:
    """Return the tools that ``choice`` names; nothing if it names none, so that all can be called."""
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.tools
    return [choice] if isinstance(choice, NamedTool | NamedCustomTool) else []


def _is_forced(choice: ToolChoice | None) -> bool:
    """Whether the answer must be a call."""
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool | NamedCustomTool)


def check_tools(tools: Sequence[Tool], model: Model) -> None:
    """Raise :class:`InvalidRequest` unless the tools are within bounds and the chat template of ``model`` shows tools."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            kind = "custom" if isinstance(tool, CustomTool) else "function"
            raise InvalidRequest(f"Two tools are called {tool.name!r}.", param=f"tools[{index}].{kind}.name")
        names.add(tool.name)
    if (size := _size(tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"`tools` is {size} bytes long; at most {MAX_TOOLS_BYTES} are accepted.", param="tools")
    if not model.texts.template.shows_tools:
        message = f"The chat template of {model.facts.name!r} has no place for tools; leave `tools` out, or name another model."
        raise InvalidRequest(message, param="tools")


def _size(tools: Sequence[Tool]) -> int:
    """Return the length of the tools as JSON. Raises :class:`InvalidRequest` if they are nested too deeply."""
    try:
        return len(json.dumps([tool.for_template() for tool in tools]))
    except RecursionError:
        raise InvalidRequest("`tools` are nested too deeply.", param="tools") from None


def callable_tools(request: ChatRequest, tools: list[Tool], family: str) -> Tools:
    """Return the tools that the answer may call, for the parser."""
    found = _callable(request, tools)
    functions = {tool.name: _not_texts(tool) for tool in found}
    customs = [tool.name for tool in found if isinstance(tool, CustomTool)]
    return Tools(family, functions, None if _several(request) else 1, customs, _is_forced(request.tool_choice))


def _several(request: ChatRequest) -> bool:
    return request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool | NamedCustomTool)


def _callable(request: ChatRequest, tools: list[Tool]) -> list[Tool]:
    """Return the tools that the answer may call."""
    names = {named.name for named in _named(request.tool_choice)}
    return [tool for tool in tools if tool.name in names] if names else tools


def guaranteed_calls(request: ChatRequest, model: Model, tools: list[Tool], family: str) -> Calls | None:
    """Return the calls that a grammar guarantees; None if the request asks for no guarantee. Raises :class:`InvalidRequest`."""
    forced = _is_forced(request.tool_choice)
    constrained = constraint_of(request) is not None  # then a call must be allowed beside it
    callable = _callable(request, tools)
    if not (forced or constrained or len(callable) < len(tools) or any(map(_is_strict, callable))):
        return None
    places = {tool.name: place for place, tool in enumerate(tools)}
    functions = [_function(tool, places[tool.name], model, family, forced=forced) for tool in callable]
    return Calls(family, functions, forced, _several(request))


def _is_strict(tool: Tool) -> bool:
    return tool.grammar is not None if isinstance(tool, CustomTool) else bool(tool.function.strict)


def _function(tool: Tool, index: int, model: Model, family: str, *, forced: bool) -> Function:
    """Return what a grammar has to know of a tool. Raises :class:`InvalidRequest` for what cannot be enforced."""
    if isinstance(tool, CustomTool):
        return Function(index, tool.name, tool.parameters, *_text_grammar(tool, index, model, family))
    return Function(index, tool.name, _schema(tool.function, index, model, forced=forced))


def _text_grammar(tool: CustomTool, index: int, model: Model, family: str) -> tuple[str, str]:
    """Return the grammar of a custom tool's text and its pattern, both empty for any text. Raises :class:`InvalidRequest`."""
    given = tool.grammar
    if given is None:
        return "", ""
    param = f"tools[{index}].custom.format.grammar.definition"
    grammar = compiled(OutputConstraint("regex" if given.syntax == "regex" else "grammar", given.definition, param), model)
    if not FAMILIES[family].frame.raw_texts:
        try:
            spelled = quoted(grammar)
        except GrammarTextError as error:
            raise InvalidRequest(f"`{param}` cannot be followed by this model: {error}.", param=param) from None
        if model.texts.grammars is not None:
            model.texts.grammars.check(spelled, param)
    return grammar, grammar.removeprefix(REGEX_START) if given.syntax == "regex" else ""


def _schema(function: FunctionDefinition, index: int, model: Model, *, forced: bool) -> dict[str, Any]:
    """Return the schema that the arguments must match: without ``strict``, a free choice only guarantees an object. Raises
    :class:`InvalidRequest` for one that grammars cannot enforce."""
    if not forced and not function.strict:
        return _ANYTHING
    schema = function.parameters
    if not schema or (
        schema.get("type", "object") == "object" and schema.keys() <= _ABOUT_NO_PARAMETER and not schema.get("properties")
    ):
        return _NOTHING
    param = f"tools[{index}].function.parameters"
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"`{param}` must have the type object.", param=param)
    whole = {"type": "object"} | schema
    grammar = grammar_of(OutputConstraint("json", whole, param))
    if model.texts.grammars is not None:
        model.texts.grammars.check(grammar, param)
    return whole


def _not_texts(tool: Tool) -> list[str]:
    """Return the names of the parameters that are not texts."""
    if isinstance(tool, CustomTool):
        return []
    root = tool.function.parameters or {}
    given = root.get("properties")
    if not isinstance(given, dict):
        return []
    return [name for name, schema in given.items() if isinstance(schema, dict) and not is_text(schema, root)]
