"""Decides from a chat request, its model's chat template and the rendered prompt how the answer is divided into parts."""

from __future__ import annotations

from engine.wire import MAX_GRAMMAR_BYTES
from gateway.errors import InvalidRequest
from gateway.output.answer import (
    AUTOMATIC,
    NO_FORMAT,
    THINKING,
    AnswerFormat,
    Calls,
    Thinking,
    answer_grammar,
    is_off,
    is_open,
    thinking_of,
)
from gateway.output.families import FAMILIES, SchemaError, family_of
from gateway.reading.endpoint import Model
from gateway.reading.structure import read_grammar
from gateway.reading.tools import callable_tools, guaranteed_calls
from gateway.schemas.chat import ChatRequest
from gateway.schemas.tools import Tool


def answer_format(request: ChatRequest, model: Model, tools: list[Tool], prompt: str) -> tuple[AnswerFormat | None, str]:
    """Return the format of the answer to ``prompt``, None if it is all text, and the grammar that it follows, empty if there is
    none. Raises :class:`InvalidRequest`."""
    thinking = _thinking(request, model, prompt)
    family = _family(model) if tools else None
    calls = None if family is None else guaranteed_calls(request, model, tools, family)
    grammar = _grammar(calls, read_grammar(request, model), thinking, model)
    if family is None and thinking is None:
        return None, grammar
    called = None if family is None else callable_tools(request, tools, family)
    shown = [*(THINKING[thinking.format] if thinking else ()), *(FAMILIES[family].tokens if family else ())]
    tokenizer = model.texts.tokenizer
    ids = [id for text in shown if (id := tokenizer.token_of(text)) is not None and id in tokenizer.special_ids]
    return AnswerFormat(called, thinking, ids), grammar


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
