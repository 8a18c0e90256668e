"""Bodies of ``/v1/length``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.schemas.chat import ChatMessage
from gateway.schemas.length_guidance import Gamma
from gateway.schemas.parameters import EndpointName, Parameters, TokenId
from gateway.schemas.truncation import MAX_ITEMS, CacheSalt, Priority
from gateway.schemas.usage import Usage

Texts = str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1, max_length=1 << 20)]
MAX_TEXTS = MAX_ITEMS


class LengthRequest(Parameters, kw_only=True):
    """Estimate how much text follows each given text. Give `input`, `prompt` or `messages`."""

    endpoint: ClassVar[EndpointName] = "length"
    input: Texts | None = None
    """Complete texts so far, prompt and answer: a text, several texts, one list of token ids, or several such lists."""
    prompt: Texts | None = None
    """Texts like `input`; with `partial`, the one prompt, as text or token ids, of all partial answers."""
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    """A conversation whose answer is to begin, or begins with `partial`."""
    partial: Texts | None = None
    """With `prompt` or `messages`: one or several partial answers, as text, or as token ids if `prompt` is given as token ids."""
    gamma: Gamma | None = None
    """Discount factor that converts values to tokens; the length model's own by default."""
    chat_template_kwargs: dict[str, Any] | None = None
    """With `messages`: further variables for the model's chat template."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. The default is true in texts and false in `messages`."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """The length model's estimate after one text."""

    index: int
    """Index of the text in the request."""
    value: float
    """Mean of 1 − gamma^(remaining tokens), from 0 (the text ends) to 1."""
    remaining_tokens: float
    """The value in tokens, ln(1 − value) / ln(gamma), including the token that ends the text: a proxy below the mean length."""


class LengthResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each text, in the order of the request."""

    id: str
    object: Literal["length"] = "length"
    created: int
    """Seconds since 1970."""
    model: str
    gamma: float
    """Discount factor that converted values to tokens."""
    data: list[Remaining]
    usage: Usage
