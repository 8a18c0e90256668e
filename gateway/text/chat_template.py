"""Renders chat messages to a prompt with the model's Jinja template, in Jinja's sandbox.

A template comes with a model, often from an untrusted source: it has access to nothing but its variables, and its output and
repetitions are bounded. Beyond plain Jinja, templates may use what the transformers documentation promises to template authors:
``raise_exception``, ``strftime_now``, ``tojson`` without HTML escaping, ``break`` and ``continue``, ``{% generation %}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

MAX_PROMPT_CHARACTERS = 1 << 26
"""Most characters of a prompt. This is far beyond any context and stops a template that repeats itself."""
_MAX_POWER = 1024
_PROBE = "probe"
_PROBE_SCHEMA = {"type": "object", "properties": {}, "required": []}


class ChatTemplateError(ValueError):
    """The template cannot render these messages. The text is for the client, and may be the template's own."""


class ChatTemplate:
    """The template of one model. It is compiled at the first ``render``, so a model with an unusable template can still score."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """``special_tokens``: variables of the template, such as ``bos_token`` and ``eos_token``. ``with_tools``: a template of its
        own for conversations with tools."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._with_tools = None if with_tools is None else ChatTemplate(with_tools, special_tokens)
        self._shown: dict[tuple[tuple[str, ...], str], bool] = {}

    @property
    def sources(self) -> str:
        """The texts of the template, and of that for tools."""
        return (self.source or "") + (self._with_tools.sources if self._with_tools is not None else "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Return the prompt. It contains its special tokens, so the caller must tokenise it without adding any.

        A template that supports content in parts (``[{"type": "text", "text": ...}]``) receives it unchanged; other templates
        receive one text with a line for each part. A template that reads parts only, such as that of Llama-Guard-3-1B, receives
        texts as parts. ``extra`` are further variables. Raises :class:`ChatTemplateError`.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **extra)
        if self._content == "parts":
            messages = [_with_parts(message) for message in messages]
        elif self._content == "text":
            messages = [_with_plain_content(message) for message in messages]
        if not self._takes_argument_objects:
            messages = [_with_argument_texts(message) for message in messages]
        return self._run(messages, {"add_generation_prompt": add_generation_prompt, "tools": tools, **extra})

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a prompt has the tools that are given."""
        if self._with_tools is not None:
            return self._with_tools.shows_tools
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": _PROBE_SCHEMA}}
        try:
            return _PROBE in self._run([{"role": "user", "content": ""}], {"add_generation_prompt": True, "tools": [tool]})
        except ChatTemplateError:
            return False

    def shows(self, roles: tuple[str, ...], variables: Mapping[str, Any]) -> bool:
        """Whether a prompt has the texts of messages with these roles, one each."""
        asked = roles, repr(variables)
        if asked not in self._shown:
            messages = [{"role": role, "content": f"{_PROBE} {role}"} for role in roles]
            text = self.render(messages, **variables)
            self._shown[asked] = all(f"{_PROBE} {role}" in text for role in roles)
        return self._shown[asked]

    def reads(self, name: str) -> bool:
        """Whether the template reads the variable ``name``. Raises :class:`ChatTemplateError`."""
        self._template  # noqa: B018  raises for a template that is missing or broken
        return name in self._variables

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        template = self._template
        pieces, room = [], MAX_PROMPT_CHARACTERS
        try:
            for piece in template.generate(messages=messages, documents=None, **{**self._special_tokens, **variables}):
                room -= len(piece)
                if room < 0:
                    raise ChatTemplateError(f"the model's chat template wrote more than {MAX_PROMPT_CHARACTERS} characters")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is untrusted code and may raise anything
            raise ChatTemplateError(f"the model's chat template refused these messages: {error}") from error
        return "".join(pieces)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.source is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions, or serve a model that has one")
        try:
            template = _Environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template is broken: line {error.lineno}: {error.message}") from error
        template.globals = dict(template.globals)  # every render copies them, which takes long from Jinja's ChainMap
        return template

    @cached_property
    def _content(self) -> Literal["both", "text", "parts"]:
        """How the content of a message is read: a text in one part renders like the plain text, or only one of them is shown."""
        plain, in_parts = (self._probed(content) for content in (_PROBE, [{"type": "text", "text": _PROBE}]))
        if in_parts is None:
            return "text"
        return "both" if plain == in_parts else "text" if plain is not None else "parts"

    def _probed(self, content: Any) -> str | None:
        """Return a conversation of one message with this content, or of a reranker's query and document; None if the template shows
        neither."""
        for roles in (("user",), ("query", "document")):
            with suppress(ChatTemplateError):
                messages = [{"role": role, "content": content} for role in roles]
                text = self._run(messages, {"add_generation_prompt": True, "tools": None})
                if _PROBE in text:
                    return text
        return None

    @cached_property
    def _variables(self) -> set[str]:
        """Names of the variables that the template does not set itself."""
        return meta.find_undeclared_variables(_Environment().parse(self.source or ""))

    @cached_property
    def _takes_argument_objects(self) -> bool:
        """Whether the arguments of tool calls are written as JSON if they are given as objects, and not only as text."""
        if not self.source or "arguments" not in self.source:
            return True
        given = [self._with_call(arguments) for arguments in ({_PROBE: _PROBE}, json.dumps({_PROBE: _PROBE}))]
        return given[1] is None or (given[0] is not None and f"{{'{_PROBE}'" not in given[0])

    def _with_call(self, arguments: Any) -> str | None:
        """Return a conversation with a tool call; None if the template refuses it."""
        call = {"id": "probe0000", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": _PROBE},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _PROBE, "tool_call_id": "probe0000", "name": _PROBE},
        ]
        try:
            return self._run(messages, {"add_generation_prompt": True, "tools": None})
        except ChatTemplateError:
            return None


def _with_argument_texts(message: Message) -> Message:
    """Return ``message`` with the arguments of its tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        if isinstance(call["function"]["arguments"], dict)
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_plain_content(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(f'content[{index}]: this model reads text only; give parts as {{"type": "text", "text": ...}}')
    return {**message, "content": "\n".join(part["text"] for part in content)}


class _GenerationTag(Extension):
    """``{% generation %}`` marks training targets; it has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with what templates may use, and with limits on ``*`` and ``**``, with which a short template could fill the
    memory."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left * right`` or ``left ** right``, unless the result would be huge."""
        if operator == "**":
            too_large = max(abs(left), abs(right)) > _MAX_POWER
        else:
            too_large = _extent(left) * _extent(right) > MAX_PROMPT_CHARACTERS
        if too_large:
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _extent(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else len(value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
