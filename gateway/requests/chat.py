"""``/v1/chat/completions``: messages to token ids through the model's chat template, and the format of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

from yardstick_llm.engine.wire import GRAMMAR_BOUNDS, MAX_GRAMMAR_BYTES, Image
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.images.decode import InvalidImage
from yardstick_llm.gateway.output.answer import (
    AUTOMATIC,
    NO_FORMAT,
    THINKING,
    AnswerFormat,
    Calls,
    Thinking,
    Tools,
    answer_grammar,
    is_off,
    is_open,
    thinking_of,
)
from yardstick_llm.gateway.output.constraint import REGEX_START, GrammarTextError, OutputConstraint, constraint_of, grammar_of
from yardstick_llm.gateway.output.families import FAMILIES, Function, SchemaError, family_of, is_text
from yardstick_llm.gateway.output.lark import quoted
from yardstick_llm.gateway.process.bounds import TimeIsUp, at_most
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.requests.images import IMAGE_CHARACTERS, ImageDecoder, check_images, check_length, urls_of, with_images
from yardstick_llm.gateway.schemas.chat import (
    MAX_TOOLS_BYTES,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    CustomTool,
    FunctionDefinition,
    FunctionTool,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolChoice,
)
from yardstick_llm.gateway.schemas.common import ImagePart
from yardstick_llm.gateway.schemas.generation import BULK, StructuredRequest
from yardstick_llm.gateway.text.chat_template import ChatTemplateError
from yardstick_llm.gateway.text.prepared import Ids, Prepared, TooManyTokens
from yardstick_llm.gateway.text.special import ControlTokens, Marked, new_mark, texts_in, with_marks


def image_parts(messages: Iterable[ChatMessage] | None) -> list[tuple[str, ImagePart]]:
    """Return the images of a conversation and the field of each, in order."""
    return [
        (f"messages[{number}].content[{place}]", part)
        for number, message in enumerate(messages or ())
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def refuse_images(messages: Iterable[ChatMessage] | None) -> None:
    """Raise :class:`InvalidImage` if a conversation has images, at an endpoint that reads none."""
    for param, _ in image_parts(messages):
        raise InvalidImage(f"`{param}`: images are not supported here; send text.", param=param, reason="endpoint")


class ChatImages:
    """The images of one conversation. It is falsy if there are none."""

    def __init__(self, messages: Iterable[ChatMessage], model: Model) -> None:
        """Decode the images. Raises :class:`InvalidImage`."""
        self._model = model
        self._request = ImageDecoder(model.facts, model.bounds, model.fetched)
        self._places = [self._request.add(part, param) for param, part in image_parts(messages)]
        if self._places:
            check_images(model.facts, self.images, self._places, "messages")

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def images(self) -> list[Image]:
        """Each image once."""
        return self._request.images

    def check_texts(self, texts: Iterable[str]) -> None:
        """Raise :class:`InvalidImage` if one of ``texts``, whose control tokens are parsed, has the token of an image."""
        token = self._model.vocabulary.decode([self._request.vision.image_token], skip_special_tokens=False)
        if self and any(token in text for text in texts):
            message = f"A text contains {token!r}, which stands for an image, and `parse_special_tokens` is set; leave one out."
            raise InvalidImage(message, param="messages", reason="token")

    def put_into(self, row: Sequence[int]) -> Ids:
        """Return the rendered conversation ``row`` with the images' tokens. Raises :class:`InvalidImage` if the chat template does
        not show every image, and :class:`ContextExceeded`."""
        vision = self._request.vision
        at = [position for position, id in enumerate(row) if id == vision.image_token]
        if len(at) != len(self._places) or any(right == left + 1 for left, right in pairwise(at)):
            message = f"The model's chat template shows {len(at)} of the {len(self._places)} images."
            raise InvalidImage(f"{message} Put them into messages of the user.", param="messages", reason="template")
        whole = with_images(row, self._places, at, self.images, vision)
        check_length(self._model.facts, len(whole), "messages")
        return whole


MAX_WORD_TOKENS = 4096
"""Most tokens of all ``bad_words``, each with and without a space."""


def is_constrained(request: StructuredRequest) -> bool:
    """Whether :func:`read_grammar` or :func:`read_bad_words` needs a worker."""
    return bool(request.bad_words) or constraint_of(request) is not None


def read_grammar(request: StructuredRequest, model: Model) -> str:
    """Return the grammar that the output of ``request`` follows, which compiles; empty if there is none. Raises
    :class:`InvalidRequest`."""
    constraint = constraint_of(request)
    return "" if constraint is None else compiled(constraint, model)


def compiled(constraint: OutputConstraint, model: Model) -> str:
    """Return the grammar of ``constraint``, which compiles. Raises :class:`InvalidRequest`."""
    try:
        with at_most(GRAMMAR_BOUNDS.seconds):
            grammar = grammar_of(constraint)
    except TimeIsUp:
        message = f"`{constraint.param}`: reading it takes longer than {GRAMMAR_BOUNDS.seconds:g} s; simplify it."
        raise InvalidRequest(message, param=constraint.param) from None
    if model.texts.grammars is not None:
        model.texts.grammars.check(grammar, constraint.param)
    return grammar


def read_bad_words(request: StructuredRequest, model: Model) -> list[list[int]]:
    """Return the tokens of each of ``bad_words``, as it is spelled within a text and after a space. Raises
    :class:`InvalidRequest`."""
    found: list[list[int]] = []
    for index, word in enumerate(request.bad_words or ()):
        param = f"bad_words[{index}]"
        spelled = word.lstrip()
        if not spelled:
            raise InvalidRequest(f"`{param}` is empty.", param=param)
        for text in (spelled, f" {spelled}"):
            ids = model.texts.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
            found += [ids] if ids not in found[-1:] else []
    if (count := sum(map(len, found))) > MAX_WORD_TOKENS:
        raise InvalidRequest(f"`bad_words` have {count} tokens; at most {MAX_WORD_TOKENS} are allowed.", param="bad_words")
    return found


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
    try:
        size = len(json.dumps([tool.for_template() for tool in tools]))
    except RecursionError:
        raise InvalidRequest("`tools` are nested too deeply.", param="tools") from None
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"`tools` is {size} bytes long; at most {MAX_TOOLS_BYTES} are accepted.", param="tools")
    if not model.texts.template.shows_tools:
        message = f"The chat template of {model.facts.name!r} has no place for tools; leave `tools` out, or name another model."
        raise InvalidRequest(message, param="tools")


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
    family = family_of(model.texts.template.sources) if chosen == AUTOMATIC else chosen
    if family is None or family == NO_FORMAT:
        message = f"The format in which {model.facts.name!r} calls tools is not known, so it cannot be read; leave `tools` out."
        remedy = f"Whoever runs this server can name the format with --tool-parser: {', '.join(FAMILIES)}."
        raise InvalidRequest(f"{message} {remedy}", param="tools")
    return family


def thinking_format(model: Model) -> str | None:
    """Return the format of the model's thinking sections; None if it has none."""
    chosen = model.formats.reasoning_parser
    if chosen == AUTOMATIC:
        return thinking_of(model.texts.template.sources)
    return None if chosen == NO_FORMAT else chosen


def _thinking(request: ChatRequest, model: Model, prompt: str) -> Thinking | None:
    """Return the thinking section that the answer may have."""
    format = thinking_format(model)
    if format is None or is_off(prompt, THINKING[format]):
        return None
    tags, token_of = THINKING[format], model.texts.tokenizer.token_of
    shown = request.include_reasoning is not False and not (request.reasoning and request.reasoning.exclude)
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


SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates read whether the model thinks: Qwen3 and most others; DeepSeek-V3.1."""


def template_variables(request: ChatRequest, model: Model) -> dict[str, Any]:
    """Return ``chat_template_kwargs`` with the variables for the request's other fields, which they override.

    Raises :class:`InvalidRequest` for a field that the model's template does not read and that asks for something else than what
    the model does anyway.
    """
    variables: dict[str, Any] = {}
    template = model.texts.template
    switch = next((name for name in SWITCHES if template.reads(name)), None)
    effort, enabled = request.reasoning_effort, request.enable_thinking
    effort_param, enabled_param = "reasoning_effort", "enable_thinking"
    if request.reasoning is not None:
        if effort is not None or enabled is not None:
            raise InvalidRequest("`reasoning` does not go with `reasoning_effort` and `enable_thinking`.", param="reasoning")
        effort, enabled = request.reasoning.effort, request.reasoning.enabled
        effort_param, enabled_param = "reasoning.effort", "reasoning.enabled"
    if request.thinking is not None:
        if enabled is not None or request.reasoning is not None:
            raise InvalidRequest("`thinking` does not go with `reasoning` and `enable_thinking`.", param="thinking")
        enabled, enabled_param = request.thinking.type == "enabled", "thinking.type"
    if request.reasoning is not None or request.thinking is not None:
        if enabled is False:
            effort = None
        elif effort is not None:
            enabled = None  # an effort says it already
    if effort is not None:
        if template.reads("reasoning_effort") and not (effort == "none" and switch):
            variables["reasoning_effort"] = effort
        elif switch:
            variables[switch] = effort != "none"
        elif effort != "none" or thinking_format(model) is not None:
            raise _not_read(effort_param, model)
    if enabled is not None:
        if switch:
            variables[switch] = enabled
        elif enabled or thinking_format(model) is not None:
            raise _not_read(enabled_param, model)
    return variables | (request.chat_template_kwargs or {})


def _not_read(name: str, model: Model) -> InvalidRequest:
    message = f"`{name}`: the chat template of {model.facts.name!r} does not read it, so it would have no effect; leave it out."
    return InvalidRequest(message, param=name)


def render(
    model: Model,
    messages: list[ChatMessage],
    variables: Mapping[str, Any] | None,
    *,
    parse_special_tokens: bool | None,
    tools: Sequence[Tool] = (),
    followed_by: Iterable[str] = (),
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = False,
) -> Marked:
    """Render the conversation to a text with the template's control tokens.

    ``variables`` come from the client and must not replace the template's own. Unless ``parse_special_tokens`` is set, the control
    tokens in users' texts are marked; the result also has a mark if a text of ``followed_by`` may need one. With
    ``continue_final_message`` the result ends with the text of the last message. Raises :class:`InvalidRequest`.
    """
    if continue_final_message and add_generation_prompt:
        message = (
            "`continue_final_message` continues the last message, and `add_generation_prompt` begins a new one; send one of them."
        )
        raise InvalidRequest(message, param="continue_final_message")
    variables = variables or {}
    _check_variables(variables)
    told = [message.for_template() for message in messages]
    offered = [tool.for_template() for tool in tools]
    source = model.texts.template.sources
    controls, mark = model.texts.tokenizer.controls, ""
    parses = bool(parse_special_tokens)
    try:
        texts = [] if parses else [*texts_in(told), *texts_in(dict(variables)), *texts_in(offered), *followed_by]
        if any(map(controls.may_form, texts)):
            mark = new_mark([*texts, source])
            told = [_marked(message, controls, mark) for message in told]
            variables = with_marks(dict(variables), controls, mark)
            offered = with_marks(offered, controls, mark)
        end = _end_last_text(told, source) if continue_final_message else ""
        asked = {} if add_generation_prompt is None else {"add_generation_prompt": add_generation_prompt}
        with _time_for_template(model):
            options = {"add_generation_prompt": not end, **variables, **asked, "tools": offered or None}
            text = model.texts.template.render(told, **options)
        return Marked(_until(text, end) if end else text, mark)
    except RecursionError:
        raise InvalidRequest("The messages are nested too deeply.", param="messages") from None


def _check_variables(variables: Mapping[str, Any]) -> None:
    if taken := {"messages", "tools", "documents", "self"} & variables.keys():
        raise InvalidRequest(f"`chat_template_kwargs` must not set {min(taken)!r}.", param="chat_template_kwargs")


def expect_roles(model: Model, roles: tuple[str, ...], variables: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidRequest` unless the chat template shows the texts of messages with these roles."""
    _check_variables(variables)
    with _time_for_template(model):
        if model.texts.template.shows(roles, variables):
            return
    message = f"The model's chat template does not show messages of {' and '.join(roles)}; the operator should choose a preset."
    raise InvalidRequest(message, param="model")


class _time_for_template(at_most):
    """A context manager around uses of the model's chat template. Raises :class:`InvalidRequest` if it refuses, or takes too
    long."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.bounds.template_seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        except TimeIsUp as late:
            error = late
        if isinstance(error, ChatTemplateError):
            raise InvalidRequest(f"{error}.", param="messages") from None
        if isinstance(error, TimeIsUp):
            message = f"The chat template took longer than {self.seconds:g} s with these messages; send fewer."
            raise InvalidRequest(message, param="messages") from None


def _end_last_text(messages: list[dict[str, Any]], source: str) -> str:
    """Add a character that occurs nowhere else to the end of the last message's text, and return it. Raises
    :class:`InvalidRequest`."""
    last = messages[-1]
    content = last["content"]
    if not content or (isinstance(content, list) and "text" not in content[-1]):
        raise InvalidRequest("The last message has no text to continue.", param=f"messages[{len(messages) - 1}].content")
    end = new_mark([*texts_in(messages), source])
    if isinstance(content, list):
        content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + end}]
    messages[-1] = last | {"content": content + end if isinstance(content, str) else content}
    return end


def _until(text: str, end: str) -> str:
    """Return ``text`` before its last ``end``."""
    before, found, _ = text.rpartition(end)
    if not found:
        message = "The model's chat template does not show the last message as it is, so it cannot be continued."
        raise InvalidRequest(message, param="continue_final_message")
    return before


def _marked(message: dict[str, Any], controls: ControlTokens, mark: str) -> dict[str, Any]:
    """Return ``message`` with marked texts. Its role needs no marks, because it is one of a fixed set."""
    return {name: value if name == "role" else _marked_field(name, value, controls, mark) for name, value in message.items()}


def _marked_field(name: str, value: Any, controls: ControlTokens, mark: str) -> Any:
    if name == "content" and isinstance(value, list):
        return [part | {"text": controls.mark(part["text"], mark)} if "text" in part else part for part in value]
    return with_marks(value, controls, mark)


def _read(request: ChatRequest, model: Model) -> Prepared:
    _check_call_ids(request.messages)
    return read_chat(request, model)


def _check_call_ids(messages: Iterable[ChatMessage]) -> None:
    """Raise :class:`InvalidRequest` for the answer to a call that no earlier message has. Calls without ids can have any."""
    known: set[str | None] = set()
    for place, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        id = message.tool_call_id
        if message.role == "tool" and id is not None and id not in known and None not in known:
            text = f"`messages[{place}]` answers the call {id[:64]!r}, which no earlier message of the assistant has."
            raise InvalidRequest(text, param=f"messages[{place}].tool_call_id")


def read_chat(request: ChatRequest, model: Model) -> Prepared:
    """Convert a conversation to token ids. Raises :class:`InvalidRequest`."""
    with _time_for_template(model):
        tools = offered_tools(request, model)
        variables = template_variables(request, model)
    images = ChatImages(request.messages, model)
    if images and bool(request.parse_special_tokens):
        told, offered = (each.for_template() for each in request.messages), (tool.for_template() for tool in tools)
        images.check_texts(texts_in([*told, variables, *offered]))
    text = render(
        model,
        request.messages,
        variables,
        parse_special_tokens=request.parse_special_tokens,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    format, grammar = answer_format(request, model, tools, text.text)
    limit, adds = model.facts.context, bool(request.add_special_tokens)
    try:
        row = model.texts.tokenizer.encode_marked(text, limit=limit, add_special_tokens=adds)
    except TooManyTokens as error:
        raise model.facts.too_long(error, "messages") from None
    bad_words = read_bad_words(request, model)
    rows = [images.put_into(row) if images else row]
    return Prepared(rows, param="messages", grammar=grammar, bad_words=bad_words, format=format, images=images.images)


def characters_of(messages: list[ChatMessage] | None) -> int:
    """Return the approximate number of characters in the texts of a conversation."""
    texts = 0
    for message in messages or ():
        content = message.content or ""
        for part in [content] if isinstance(content, str) else content:
            # of an image, as many as take about the time that it takes
            texts += IMAGE_CHARACTERS if isinstance(part, ImagePart) else len(part if isinstance(part, str) else part.text)
    return texts


CHAT = Endpoint(
    kind=ChatRequest,
    bulk={
        "messages": [ChatMessage("user")],
        "chat_template_kwargs": {},
        "tools": [FunctionTool(FunctionDefinition("stand_in"))],
        "user": "",
        **BULK,
    },
    read=_read,
    characters=lambda request, _: characters_of(request.messages),
    urls=lambda request: urls_of(image_parts(request.messages)),
)
