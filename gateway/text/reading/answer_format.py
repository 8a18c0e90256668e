"""Decides from a chat request, its model's chat template and the rendered prompt how the answer is divided into parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.wire import MAX_GRAMMAR_BYTES
from gateway.errors import InvalidRequest
from gateway.schemas.chat import ChatRequest
from gateway.schemas.tools import MAX_TOOLS_BYTES, FunctionDefinition, NamedTool, Tool
from gateway.structure.request import Constraint, constraint_of, grammar_of
from gateway.text.reading.endpoint import Model
from gateway.text.reading.structure import read_grammar
from gateway.tools.answer import AnswerFormat, Thinking, Tools
from gateway.tools.families.qwen3_coder import is_text
from gateway.tools.families.registry import FAMILIES, family_of
from gateway.tools.formats import AUTOMATIC, NO_FORMAT
from gateway.tools.frame import Function, SchemaError
from gateway.tools.grammar import Calls, answer_grammar
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


def answer_format(request: ChatRequest, model: Model, tools: list[Tool], prompt: str) -> tuple[AnswerFormat | None, str]:
    """Return the format of the answer to ``prompt``, None if it is all text, and the grammar that it follows, empty if there is
    none. Raises :class:`InvalidRequest`."""
    thinking = _thinking(request, model, prompt)
    family = _family(model) if tools else None
    calls = None if family is None else _guaranteed(request, model, tools, family)
    grammar = _grammar(calls, read_grammar(request, model), thinking, model)
    if family is None and thinking is None:
        return None, grammar
    called = None
    if family is not None:
        functions = {tool.function.name: _not_texts(tool.function) for tool in tools}
        called = Tools(family, functions, None if _several(request) else 1)
    shown = [*(THINKING[thinking.format] if thinking else ()), *(FAMILIES[family].tokens if family else ())]
    tokenizer = model.texts.tokenizer
    ids = [id for text in shown if (id := tokenizer.token_of(text)) is not None and id in tokenizer.special_ids]
    return AnswerFormat(called, thinking, ids), grammar


def _several(request: ChatRequest) -> bool:
    return request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)


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


def _thinking(request: ChatRequest, model: Model, prompt: str) -> Thinking | None:
    """Return the thinking section that the answer may have."""
    format = thinking_format(model)
    if format is None or is_off(prompt, THINKING[format]):
        return None
    tags, token_of = THINKING[format], model.texts.tokenizer.token_of
    shown = request.include_reasoning is not False
    return Thinking(format, is_open(prompt, tags), token_of(tags.open), token_of(tags.close), shown)


def _guaranteed(request: ChatRequest, model: Model, tools: list[Tool], family: str) -> Calls | None:
    """Return the calls that a grammar guarantees; None if the request asks for no guarantee. Raises :class:`InvalidRequest`."""
    choice = request.tool_choice
    forced = choice == "required" or isinstance(choice, NamedTool)
    constrained = constraint_of(request) is not None  # then a call must be allowed beside it
    if not forced and not constrained and not any(tool.function.strict for tool in tools):
        return None
    functions = [
        Function(index, tool.function.name, _schema(tool.function, index, model, forced=forced))
        for index, tool in enumerate(tools)
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
    return Calls(family, functions, forced, _several(request))


def _grammar(calls: Calls | None, constraint: str, thinking: Thinking | None, model: Model) -> str:
    """Return the grammar of the answer. Raises :class:`InvalidRequest`."""
    if calls is None and (thinking is None or not constraint):
        return constraint
    try:
        grammar = answer_grammar(
            model.texts.tokenizer.grammar_token_of,
            calls=calls,
            constraint=constraint,
            thinking=THINKING[thinking.format] if thinking else None,
            opened=thinking is not None and thinking.opened,
        )
    except SchemaError as error:
        raise InvalidRequest(f"`tools`: the parameters of a function cannot be guaranteed: {error}.", param="tools") from None
    if len(grammar) > MAX_GRAMMAR_BYTES:
        message = f"The grammar of the answer has {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES} are possible. Send fewer tools."
        raise InvalidRequest(message, param="tools")
    if not constraint and model.texts.grammars is not None:  # the parts of a combination were checked by themselves
        model.texts.grammars.check(grammar, "tools")
    return grammar


def _schema(function: FunctionDefinition, index: int, model: Model, *, forced: bool) -> dict[str, Any]:
    """Return the schema that the arguments must match: without ``strict``, a free choice only guarantees an object. Raises
    :class:`InvalidRequest` for one that grammars cannot enforce."""
    if not forced and not function.strict:
        return _ANYTHING
    schema = function.parameters
    if not schema:
        return _NOTHING
    param = f"tools[{index}].function.parameters"
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"`{param}` must have the type object.", param=param)
    whole = {"type": "object"} | schema
    grammar = grammar_of(Constraint("json", whole, param))
    if model.texts.grammars is not None:
        model.texts.grammars.check(grammar, param)
    return whole


def _not_texts(function: FunctionDefinition) -> list[str]:
    """Return the names of the parameters that are not texts."""
    given = (function.parameters or {}).get("properties")
    if not isinstance(given, dict):
        return []
    return [name for name, schema in given.items() if isinstance(schema, dict) and not is_text(schema)]
