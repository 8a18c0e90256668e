"""``/v1/responses``: input items to the messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from yardstick_llm.gateway.errors import ContextExceeded, InvalidRequest
from yardstick_llm.gateway.requests.chat import read_chat
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.schemas import chat as chat_tools
from yardstick_llm.gateway.schemas.chat import (
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    CustomCall,
    EarlierCall,
    FunctionCall,
    FunctionDefinition,
    NamedCustomTool,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)
from yardstick_llm.gateway.schemas.common import MessagePart, TextPart, new_id
from yardstick_llm.gateway.schemas.generation import BULK, JsonSchema, ResponseFormat, TextRequest
from yardstick_llm.gateway.schemas.responses import (
    AnyTool,
    Choice,
    ChosenCustom,
    ChosenFunction,
    ChosenTools,
    CustomTool,
    FunctionTool,
    InputItem,
    ItemPart,
    Namespace,
    ResponseRequest,
    TextFormat,
)
from yardstick_llm.gateway.text.prepared import Items, Prepared

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_OTHER_MEDIA = "`{}` is no text, and this endpoint reads text only. Send images to /v1/chat/completions, as `image_url` parts."
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Fields of a chat request, and the fields of a request for a response that they come from."""
_TOOL_PATH = re.compile(r"tools\[(\d+)\]\.(?:function|custom)\b(\.format\.grammar\b)?")
"""A path in the tools of a chat request."""
REFERENCE = (
    "`{}` refers to a stored item, which is not supported: send the item itself, or `previous_response_id`. Clients send whole "
    "items if their `store` is false."
)
_SHARED = (*TextRequest.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs", "thinking_budget")
"""Fields that both have."""


def items_of(request: ResponseRequest) -> list[InputItem]:
    """Return the items of ``input``, each with an id. Raises :class:`InvalidRequest` for an incomplete one."""
    if isinstance(request.input, str):
        items = [InputItem(role="user", content=[ItemPart("input_text", request.input)])]
    else:
        items = request.input
        for place, item in enumerate(items):
            _check(item, f"input[{place}]")
    return [item if item.id else msgspec.structs.replace(item, id=f"{_PREFIXES[item.type]}_{new_id()}") for item in items]


def _check(item: InputItem, param: str) -> None:
    if item.type == "item_reference":
        raise InvalidRequest(REFERENCE.format(param), param=f"{param}.type")
    needed = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
        "reasoning": (),
    }[item.type]
    for name in ("content", "output"):
        for place, part in enumerate(parts if isinstance(parts := getattr(item, name), list) else ()):
            if part.type in ("input_image", "input_file", "input_audio"):
                path = f"{param}.{name}[{place}]"
                raise InvalidRequest(_OTHER_MEDIA.format(path), param=f"{path}.type")
    missing = next((name for name in needed if getattr(item, name) is None), None)
    if missing is not None:
        message = f"`{param}` is of type `{item.type}` and lacks `{missing}`."
        raise InvalidRequest(message, param=f"{param}.{missing}")


def check_call_ids(earlier: Sequence[InputItem], own: Sequence[InputItem]) -> None:
    """Raise :class:`InvalidRequest` for an output in ``own`` whose call neither ``earlier`` nor an item before it has."""
    known = {item.call_id for item in earlier if item.type in _CALLS}
    for place, item in enumerate(own):
        if item.type in _CALLS:
            known.add(item.call_id)
        elif item.type in _OUTPUTS and item.call_id not in known:
            message = f"`input[{place}]` is the output of the call {(item.call_id or '')[:64]!r}, which no earlier item has."
            raise InvalidRequest(message, param=f"input[{place}].call_id")


def messages_of(items: Iterable[InputItem]) -> list[ChatMessage]:
    """Return the messages of a conversation. Function calls, and the reasoning before them, join the assistant's message."""
    messages: list[ChatMessage] = []
    reasoning: list[str] = []

    def assistant() -> ChatMessage:
        """Return the assistant's message that is open, or a new one."""
        if not messages or messages[-1].role != "assistant" or reasoning:
            messages.append(ChatMessage("assistant", reasoning_content="".join(reasoning) or None))
            reasoning.clear()
        return messages[-1]

    for item in items:
        if item.type == "reasoning":
            reasoning.append(_text(item.content))
        elif item.type in _CALLS:
            message = assistant()
            if message.tool_calls is None:
                message.tool_calls = []
            message.tool_calls.append(_call(item))
        elif item.type in _OUTPUTS:
            messages.append(ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))
        elif item.role == "assistant":
            thinking = "".join(reasoning) or None
            reasoning.clear()
            messages.append(ChatMessage("assistant", _content(item.content), reasoning_content=thinking))
        else:
            messages.append(ChatMessage(item.role or "user", _content(item.content)))
    return messages


def _call(item: InputItem) -> EarlierCall:
    name = full_name(item.namespace, item.name or "")
    if item.type == "custom_tool_call":
        return EarlierCall(id=item.call_id, type="custom", custom=CustomCall(name, item.input or ""))
    return EarlierCall(FunctionCall(name, item.arguments), item.call_id)


def _content(content: str | list[ItemPart] | None) -> str | list[MessagePart]:
    if isinstance(content, list) and len(content) > 1:
        return [TextPart(part.refusal or part.text) for part in content]
    return _text(content)


def _text(content: str | list[ItemPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.refusal or part.text for part in content)
    return content or ""


def as_chat(request: ResponseRequest, messages: list[ChatMessage]) -> ChatRequest:
    """Return the chat request that asks for the same answer to ``messages``."""
    shared: dict[str, Any] = {name: getattr(request, name) for name in _SHARED}
    fields: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.includes_logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
    }
    given = [*tools_of(request.tools)]
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` has {len(given)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    tools = [_tool(tool, full_name(namespace, tool.name)) for _, namespace, tool in given]
    if request.text is not None and request.text.format is not None:
        if request.response_format is not None:
            message = "`text.format` and `response_format` both constrain the output; send one of them."
            raise InvalidRequest(message, param="response_format")
        shared["response_format"] = _response_format(request.text.format)
    return ChatRequest(**shared, **fields, tools=tools or None, tool_choice=_choice(request.tool_choice))


def tools_of(given: Iterable[AnyTool] | None) -> Iterator[tuple[str, str | None, FunctionTool | CustomTool]]:
    """Yield each tool after its path in the request and its namespace."""
    for place, tool in enumerate(given or ()):
        if isinstance(tool, Namespace):
            yield from ((f"tools[{place}].tools[{inner}]", tool.name, each) for inner, each in enumerate(tool.tools))
        else:
            yield f"tools[{place}]", None, tool


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def _tool(tool: FunctionTool | CustomTool, name: str) -> Tool:
    if isinstance(tool, FunctionTool):
        return chat_tools.FunctionTool(FunctionDefinition(name, tool.description, tool.parameters, tool.strict))
    given, format = tool.format, None
    if given is not None and given.definition is not None and given.syntax is not None:
        format = chat_tools.CustomFormat("grammar", chat_tools.GrammarText(given.definition, given.syntax))
    return chat_tools.CustomTool(chat_tools.CustomDefinition(name, tool.description, format))


def _choice(choice: Choice | None) -> ToolChoice | None:
    if isinstance(choice, ChosenFunction | ChosenCustom):
        return _named(choice)
    if isinstance(choice, ChosenTools):
        return chat_tools.AllowedTools(chat_tools.Allowed(choice.mode, [*map(_named, choice.tools)]))
    return choice


def _named(choice: ChosenFunction | ChosenCustom) -> NamedTool | NamedCustomTool:
    named = NamedFunction(choice.name)
    return NamedTool(named) if isinstance(choice, ChosenFunction) else NamedCustomTool(named)


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema is None:
        raise InvalidRequest("`text.format` is of type `json_schema` and lacks `schema`.", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=format.schema, name=format.name, strict=format.strict))


def renamed(error: InvalidRequest, tools: Iterable[AnyTool] | None = None) -> InvalidRequest:
    """Return ``error`` of a chat request with the names of the fields of a request for a response, which has ``tools``."""
    message, param = error.message, error.param
    for chat, response in _NAMES.items():
        message = message.replace(f"`{chat}`", f"`{response}`")
        if param is not None and (param == chat or param.startswith((f"{chat}.", f"{chat}["))):
            param = response if chat == "messages" else response + param[len(chat) :]
    places = [path for path, _, _ in tools_of(tools)]

    def own(found: re.Match[str]) -> str:
        return places[int(found[1])] + (".format" if found[2] else "")

    if places:
        message, param = _TOOL_PATH.sub(own, message), param and _TOOL_PATH.sub(own, param)
    return type(error)(message, param=param)


ROOM_SHARE = 4
"""With `truncation` "auto", a part of the context stays free for the answer: `max_output_tokens`, or at least one of this many."""

_items = msgspec.json.Decoder(list[InputItem])
_encoder = msgspec.json.Encoder()


def _read(request: ResponseRequest, model: Model) -> Prepared:
    own = items_of(request)
    if not own and not model.earlier:
        raise InvalidRequest("`input` is empty; send a text or at least one item.", param="input")
    earlier = _items.decode(b"[%b]" % model.earlier) if model.earlier else []
    check_call_ids(earlier, own)
    items = [*earlier, *own]
    messages = messages_of(items)
    try:
        prepared = _fitted(request, messages, model)
    except InvalidRequest as error:
        raise renamed(error, request.tools) from None
    prepared.param = "input"
    prepared.response = memoryview(_encoder.encode(request.instructions))
    if request.store:
        prepared.items = Items.of((item.id or "", _encoder.encode(item)) for item in own)
    return prepared


def _fitted(request: ResponseRequest, messages: list[ChatMessage], model: Model) -> Prepared:
    """Read the messages; with `truncation` "auto", as many of the newest as fit. Raises :class:`InvalidRequest`."""

    def read(left_out: int) -> Prepared:
        instructions = [] if request.instructions is None else [ChatMessage("system", request.instructions)]
        return read_chat(as_chat(request, [*instructions, *messages[left_out:]]), model)

    if request.truncation != "auto":
        return read(0)
    context = model.facts.context
    room = min(request.max_output_tokens or context // ROOM_SHARE, context // 2)

    def fitting(left_out: int) -> Prepared | None:
        try:
            prepared = read(left_out)
        except ContextExceeded:
            return None
        return prepared if len(prepared.rows[0]) + room <= context else None

    if (whole := fitting(0)) is not None:
        return whole
    begins = [place for place, message in enumerate(messages) if place and message.role != "tool"]
    low, high, found = 0, len(begins), None
    while low < high:
        middle = (low + high) // 2
        if (prepared := fitting(begins[middle])) is not None:
            high, found = middle, prepared
        else:
            low = middle + 1
    if found is None:
        return read(begins[-1] if begins else 0)
    found.truncated = list(range(begins[low]))
    return found


RESPONSES = Endpoint(
    kind=ResponseRequest,
    bulk={"input": "", "instructions": "", "chat_template_kwargs": {}, **BULK},  # the response repeats the other fields
    read=_read,
    characters=lambda request, _: _characters(request),
)


def _characters(request: ResponseRequest) -> int:
    if isinstance(request.input, str):
        return len(request.input) + len(request.instructions or "")
    return len(request.instructions or "")
