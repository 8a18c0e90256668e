"""``/tokenize`` and ``/detokenize``.

The fields are those of vLLM (``vllm/entrypoints/serve/tokenize/protocol.py``) and those that the remote tokeniser of lm-eval reads
(``RemoteTokenizer`` in ``lm_eval/utils.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.requests import chat
from yardstick_llm.gateway.requests.chat import check_tools, refuse_images
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.schemas.chat import ChatMessage, Tools
from yardstick_llm.gateway.schemas.parameters import EndpointName, Parameters, TokenId
from yardstick_llm.gateway.text.prepared import Prepared, TooManyTokens

MAX_TOKENS = 1 << 20


class TokenizeRequest(Parameters, kw_only=True):
    """Convert a text or a conversation to token ids. Give `prompt` or `messages`."""

    endpoint: ClassVar[EndpointName] = "tokenize"
    model: str | None = None
    """Name of the model; optional if only one is served."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    """A conversation, for the model's chat template."""
    add_special_tokens: bool | None = None
    """Add the special tokens, such as BOS, that the tokeniser adds to a text. The default is true for `prompt` and false for
    `messages`, because a chat template writes them."""
    return_token_strs: bool | None = False
    """Return the spelling of each token in the vocabulary as well."""
    add_generation_prompt: bool | None = None
    """With `messages`: end the prompt with the beginning of the answer; true by default."""
    continue_final_message: bool | None = False
    """With `messages`: end the prompt within the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """With `messages`: further variables for the model's chat template."""
    tools: Tools | None = None
    """With `messages`: functions that the model may call."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. The default is true in `prompt` and false in `messages`."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a text."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Largest number of prompt and completion tokens together; a longer text is tokenised too."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """Spelling of each token in the vocabulary, such as `Ġred`; null unless `return_token_strs` is set."""


class DetokenizeRequest(Parameters, kw_only=True):
    """Convert token ids to text."""

    endpoint: ClassVar[EndpointName] = "detokenize"
    model: str | None = None
    """Name of the model; optional if only one is served."""
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
    """Token ids."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids."""

    prompt: str
    """The text with its special tokens. Bytes that are not UTF-8 become U+FFFD."""


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokeniser's configuration, with the names of `tokenizer_config.json`."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    """The class of transformers that loads any `tokenizer.json`."""
    model_max_length: int
    """Largest number of prompt and completion tokens together."""
    chat_template: str | None
    """Source of the model's Jinja template; null if it has none."""
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None


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
    characters=lambda request, _: len(request.prompt or "") + chat.characters_of(request.messages),
)


LIGHT_TOKENS = 1024
"""Most tokens that are converted on the event loop, in less than a millisecond."""


def _detokenize_read(request: DetokenizeRequest, model: Model) -> Prepared:
    model.bounds.check("max_request_tokens", len(request.tokens), "tokens", "tokens")
    model.facts.check_ids(request.tokens, "tokens")
    response = DetokenizeResponse(prompt=model.vocabulary.decode(request.tokens, skip_special_tokens=False))
    return Prepared([], param="tokens", response=memoryview(msgspec.json.encode(response)), converted=len(request.tokens))


DETOKENIZE = Endpoint(
    kind=DetokenizeRequest,
    bulk={"tokens": [], "user": ""},
    read=_detokenize_read,
    is_light=lambda request: len(request.tokens) <= LIGHT_TOKENS,
    characters=lambda request, _: len(request.tokens),
)
