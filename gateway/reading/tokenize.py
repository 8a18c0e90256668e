"""``/tokenize``: a text or a conversation to token ids, and the response body."""

from __future__ import annotations

import msgspec

from gateway.errors import InvalidRequest
from gateway.reading import chat
from gateway.reading.chat_images import refuse_images
from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.tools import check_tools
from gateway.schemas.tokenize import TokenizeRequest, TokenizeResponse
from gateway.text.bounds import TooManyTokens
from gateway.text.prepared import Prepared


def _read(request: TokenizeRequest, model: Model) -> Prepared:
    given = [name for name in ("prompt", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        message = "Give either `prompt` (a text) or `messages` (a conversation)."
        raise InvalidRequest(message, param=given[1] if given else "prompt")
    try:
        ids = _conversation(request, model) if request.prompt is None else _text(request, request.prompt, model)
    except TooManyTokens as error:
        most = f"at most {model.bounds.max_request_tokens} are tokenised at once (the server's `max_request_tokens`)"
        raise InvalidRequest(f"`{given[0]}` is {error} long; {most}.", param=given[0]) from None
    spelled = model.texts.tokenizer.spelled(ids) if request.return_token_strs else None
    response = TokenizeResponse(count=len(ids), max_model_len=model.facts.context, tokens=ids, token_strs=spelled)
    return Prepared([], param=given[0], response=memoryview(msgspec.json.encode(response)), converted=len(ids))


def _text(request: TokenizeRequest, prompt: str, model: Model) -> list[int]:
    model.bounds.check("max_request_characters", len(prompt), "characters that must be tokenised", "prompt")
    return model.texts.tokenizer.encode(
        prompt,
        limit=model.bounds.max_request_tokens,
        add_special_tokens=request.add_special_tokens is not False,
        parse_special_tokens=request.parse_special_tokens is not False,
    )


def _conversation(request: TokenizeRequest, model: Model) -> list[int]:
    tools = request.tools or []
    if tools:
        check_tools(tools, model)
    refuse_images(request.messages)
    text = chat.render(
        model,
        request.messages or [],
        request.chat_template_kwargs,
        parse_special_tokens=request.parse_special_tokens,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    model.bounds.check("max_request_characters", len(text.text), "characters that must be tokenised", "messages")
    limit = model.bounds.max_request_tokens
    return model.texts.tokenizer.encode_marked(text, limit=limit, add_special_tokens=bool(request.add_special_tokens))


TOKENIZE = Endpoint(
    kind=TokenizeRequest,
    bulk={
        "prompt": "",
        "messages": chat.CHAT.bulk["messages"],
        "chat_template_kwargs": {},
        "tools": chat.CHAT.bulk["tools"],
        "user": "",
    },
    read=_read,
    is_light=lambda _: False,
    characters=lambda request, _: len(request.prompt or "") + chat.characters_of(request.messages),
)
