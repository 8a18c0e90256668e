"""Decides from a chat request, its model's chat template and the rendered prompt how the answer is divided into parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.errors import InvalidRequest
from gateway.schemas.chat import ChatRequest
from gateway.schemas.tools import MAX_TOOLS_BYTES, FunctionDefinition, NamedTool, Tool
from gateway.text.reading.endpoint import Model
from gateway.tools import answer
from gateway.tools.families.qwen3_coder import is_text
from gateway.tools.families.registry import FAMILIES, family_of
from gateway.tools.formats import AUTOMATIC, NO_FORMAT
from gateway.tools.frame import Function, SchemaError
from gateway.tools.grammar import tool_grammar
from gateway.tools.thinking import THINKING, is_off, is_open, thinking_of

_ANYTHING = {"type": "object"}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def offered_tools(request: ChatRequest, model: Model) -> list[Tool]:
    """Return the tools that the model sees: none with the choice ``none``. Raises :class:`InvalidRequest`."""
    choice = request.tool_choice
    if not request.tools:
        if choice == "required" or isinstance(choice, NamedTool):
            raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
        return []
    check_tools(request.tools, model)
    if choice == "none":
        return []
    names = [tool.function.name for tool in request.tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequest(f"`tool_choice`: there is no tool {choice.function.name[:64]!r} in `tools`.", param="tool_choice")
    return request.tools


def check_tools(tools: Sequence[Tool], model: Model) -> None:
    """Raise :class:`InvalidRequest` unless the tools are within bounds and the chat template of ``model`` shows tools."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise InvalidRequest(f"Two tools are called {tool.function.name!r}.", param=f"tools[{index}].function.name")
        names.add(tool.function.name)
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


def answer_format(request: ChatRequest, model: Model, tools: list[Tool], prompt: str) -> answer.AnswerFormat | None:
    """Return the format of the answer to ``prompt``; None if it is all text. Raises :class:`InvalidRequest`."""
    thinking = _thinking(request, model, prompt)
    if not tools and thinking is None:
        return None
    shown = list(THINKING[thinking.format]) if thinking else []
    called, grammar = None, None
    if tools:
        family = _family(model)
        shown += FAMILIES[family].tokens
        single = request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool)
        functions = {tool.function.name: _not_texts(tool.function) for tool in tools}
        called = answer.Tools(family, functions, 1 if single else None)
        grammar = _grammar(request, model, tools, family, thinking, several=not single)
    tokenizer = model.texts.tokenizer
    ids = [id for text in shown if (id := tokenizer.token_of(text)) in tokenizer.special_ids and id is not None]
    return answer.AnswerFormat(called, thinking, grammar, ids)


def _family(model: Model) -> str:
    """Return the family of the model's tool calls. Raises :class:`InvalidRequest`."""
    chosen = model.formats.tool_parser
    family = family_of(model.texts.template.source or "") if chosen == AUTOMATIC else chosen
    if family is None or family == NO_FORMAT:
        message = f"The format in which {model.facts.name!r} calls tools is not known, so it cannot be read; leave `tools` out."
        remedy = f"Whoever runs this server can name the format with --tool-parser: {', '.join(FAMILIES)}."
        raise InvalidRequest(f"{message} {remedy}", param="tools")
    return family


def thinking_format(model: Model) -> str | None:
    """Return the format of the model's thinking sections; None if it has none."""
    chosen = model.formats.reasoning_parser
    if chosen == AUTOMATIC:
        return thinking_of(model.texts.template.source or "")
    return None if chosen == NO_FORMAT else chosen


def _thinking(request: ChatRequest, model: Model, prompt: str) -> answer.Thinking | None:
    """Return the thinking section that the answer may have."""
    format = thinking_format(model)
    if format is None or is_off(prompt, THINKING[format]):
        return None
    tags, token_of = THINKING[format], model.texts.tokenizer.token_of
    shown = request.include_reasoning is not False
    return answer.Thinking(format, is_open(prompt, tags), token_of(tags.open), token_of(tags.close), shown)


def _grammar(
    request: ChatRequest, model: Model, tools: list[Tool], family: str, thinking: answer.Thinking | None, *, several: bool
) -> str | None:
    """Return the grammar that guarantees what the request asks for; None if it asks for no guarantee. Raises
    :class:`InvalidRequest`."""
    choice = request.tool_choice
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not forced and not any(tool.function.strict for tool in tools):
        return None
    functions = [
        Function(index, tool.function.name, _schema(tool.function, index, forced=forced))
        for index, tool in enumerate(tools)
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
    tags = THINKING[thinking.format] if thinking else None
    try:
        return tool_grammar(
            family,
            functions,
            model.texts.tokenizer.grammar_token_of,
            forced=forced,
            several=several,
            thinking=tags,
            opened=thinking is not None and thinking.opened,
        )
    except SchemaError as error:
        raise InvalidRequest(f"`tools`: the parameters of a function cannot be guaranteed: {error}.", param="tools") from None
    except RecursionError:
        raise InvalidRequest("`tools` are nested too deeply.", param="tools") from None


def _schema(function: FunctionDefinition, index: int, *, forced: bool) -> dict[str, Any]:
    """Return the schema that the arguments must match: without ``strict``, a free choice only guarantees an object."""
    if not forced and not function.strict:
        return _ANYTHING
    schema = function.parameters
    if not schema:
        return _NOTHING
    if schema.get("type", "object") != "object":
        param = f"tools[{index}].function.parameters"
        raise InvalidRequest(f"`{param}` must have the type object.", param=param)
    return {"type": "object"} | schema


def _not_texts(function: FunctionDefinition) -> list[str]:
    """Return the names of the parameters that are not texts."""
    given = (function.parameters or {}).get("properties")
    if not isinstance(given, dict):
        return []
    return [name for name, schema in given.items() if isinstance(schema, dict) and not is_text(schema)]
