"""``/v1/chat/completions``: messages to token ids, through the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from gateway.errors import InvalidRequest
from gateway.process.deadline import TimeIsUp, at_most
from gateway.reading.answer_format import answer_format
from gateway.reading.chat_images import ChatImages, image_parts
from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.images import IMAGE_CHARACTERS, urls_of
from gateway.reading.structure import read_bad_words
from gateway.reading.thinking import template_variables
from gateway.reading.tools import offered_tools
from gateway.schemas.chat import ChatMessage, ChatRequest
from gateway.schemas.content import ImagePart, MessagePart
from gateway.schemas.structure import BULK
from gateway.schemas.tools import FunctionDefinition, FunctionTool, Tool
from gateway.text.bounds import TooManyTokens
from gateway.text.chat_template import ChatTemplateError
from gateway.text.prepared import Prepared
from gateway.text.special import ControlTokens, Marked, new_mark, texts_in, with_marks


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
    taken = {"messages", "tools", "documents", "self"} & variables.keys()
    if taken:
        raise InvalidRequest(f"`chat_template_kwargs` must not set {min(taken)!r}.", param="chat_template_kwargs")
    told = [message.for_template() for message in messages]
    offered = [tool.for_template() for tool in tools]
    source = model.texts.template.source or ""
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
        images.check_texts(_texts(request, variables, tools))
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


def _texts(request: ChatRequest, variables: Mapping[str, Any] | None, tools: Sequence[Tool]) -> list[str]:
    """Return all texts of a request that its prompt may show."""
    told = [message.for_template() for message in request.messages]
    return [*texts_in(told), *texts_in(dict(variables or {})), *texts_in([tool.for_template() for tool in tools])]


def characters_of(messages: list[ChatMessage] | None) -> int:
    """Return the approximate number of characters in the texts of a conversation."""
    return sum(map(_characters, messages or ()))


def _characters(message: ChatMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(map(_part_characters, content))


def _part_characters(part: MessagePart) -> int:
    """Return the number of characters of a part; of an image, as many as take about the time that it takes."""
    return IMAGE_CHARACTERS if isinstance(part, ImagePart) else len(part.text)


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
    is_light=lambda _: False,
    characters=lambda request, _: characters_of(request.messages),
    urls=lambda request: urls_of(image_parts(request.messages)),
)
