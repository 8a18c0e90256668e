"""``/v1/chat/completions``: messages to token ids, through the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.errors import InvalidRequest
from gateway.schemas.chat import ChatMessage, ChatRequest
from gateway.schemas.structure import BULK
from gateway.schemas.tools import FunctionDefinition, Tool
from gateway.text.bounds import TooManyTokens
from gateway.text.chat_template import ChatTemplateError
from gateway.text.deadline import TimeIsUp, at_most
from gateway.text.prepared import Prepared
from gateway.text.reading.answer_format import answer_format, offered_tools
from gateway.text.reading.endpoint import Endpoint, Model
from gateway.text.reading.structure import read_bad_words
from gateway.text.reading.thinking import template_variables
from gateway.text.special import ControlTokens, Marked, new_mark, texts_in, with_marks


def render(
    model: Model,
    messages: list[ChatMessage],
    variables: Mapping[str, Any] | None,
    *,
    parse_special_tokens: bool | None,
    tools: Sequence[Tool] = (),
    followed_by: Iterable[str] = (),
    add_generation_prompt: bool = True,
) -> Marked:
    """Render the conversation to a text with the template's control tokens.

    ``variables`` come from the client and must not replace the template's own. Unless ``parse_special_tokens`` is set, the control
    tokens in users' texts are marked; the result also has a mark if a text of ``followed_by`` may need one. Raises
    :class:`InvalidRequest`.
    """
    variables = variables or {}
    taken = {"messages", "tools", "documents", "self"} & variables.keys()
    if taken:
        raise InvalidRequest(f"`chat_template_kwargs` must not set {min(taken)!r}.", param="chat_template_kwargs")
    told = [message.for_template() for message in messages]
    offered = [tool.for_template() for tool in tools]
    controls, mark = model.texts.tokenizer.controls, ""
    parses = model.bounds.parse_special_tokens_in_messages if parse_special_tokens is None else parse_special_tokens
    try:
        texts = [] if parses else [*texts_in(told), *texts_in(dict(variables)), *texts_in(offered), *followed_by]
        if any(map(controls.may_form, texts)):
            mark = new_mark([*texts, model.texts.template.source or ""])
            told = [_marked(message, controls, mark) for message in told]
            variables = with_marks(dict(variables), controls, mark)
            offered = with_marks(offered, controls, mark)
        with _time_for_template(model):
            options = {"add_generation_prompt": add_generation_prompt, **variables, "tools": offered or None}
            return Marked(model.texts.template.render(told, **options), mark)
    except RecursionError:
        raise InvalidRequest("The messages are nested too deeply.", param="messages") from None


@contextmanager
def _time_for_template(model: Model) -> Iterator[None]:
    """Run the model's chat template in the block. Raises :class:`InvalidRequest` if it refuses, or takes too long."""
    try:
        with at_most(model.bounds.template_seconds):
            yield
    except ChatTemplateError as error:
        raise InvalidRequest(f"{error}.", param="messages") from None
    except TimeIsUp:
        limit = f"{model.bounds.template_seconds:g} s"
        raise InvalidRequest(
            f"The chat template took longer than {limit} with these messages; send fewer.", param="messages"
        ) from None


def _marked(message: dict[str, Any], controls: ControlTokens, mark: str) -> dict[str, Any]:
    """Return ``message`` with marked texts. Its role needs no marks, because it is one of a fixed set."""
    return {name: value if name == "role" else _marked_field(name, value, controls, mark) for name, value in message.items()}


def _marked_field(name: str, value: Any, controls: ControlTokens, mark: str) -> Any:
    if name == "content" and isinstance(value, list):
        return [part | {"text": controls.mark(part["text"], mark)} for part in value]
    return with_marks(value, controls, mark)


def _read(request: ChatRequest, model: Model) -> Prepared:
    with _time_for_template(model):
        tools = offered_tools(request, model)
        variables = template_variables(request, model)
    text = render(model, request.messages, variables, parse_special_tokens=request.parse_special_tokens, tools=tools)
    format, grammar = answer_format(request, model, tools, text.text)
    try:
        row = model.texts.tokenizer.encode_marked(text, limit=model.facts.context)
    except TooManyTokens as error:
        raise model.facts.too_long(error, "messages") from None
    return Prepared([row], param="messages", format=format, grammar=grammar, bad_words=read_bad_words(request, model))


def characters_of(messages: list[ChatMessage] | None) -> int:
    """Return the approximate number of characters in the texts of a conversation."""
    return sum(map(_characters, messages or ()))


def _characters(message: ChatMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


CHAT = Endpoint(
    kind=ChatRequest,
    bulk={
        "messages": [ChatMessage("user")],
        "chat_template_kwargs": {},
        "tools": [Tool("function", FunctionDefinition("stand_in"))],
        "user": "",
        **BULK,
    },
    read=_read,
    is_light=lambda _: False,
    characters=lambda request, _: characters_of(request.messages),
)
