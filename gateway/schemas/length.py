"""Bodies of ``/v1/length``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.schemas.chat import ChatMessage
from gateway.schemas.guidance import Gamma
from gateway.schemas.parameters import Endpoint, Parameters
from gateway.schemas.score import MAX_ITEMS, CacheSalt, Priority
from gateway.schemas.usage import Usage

Texts = str | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1, max_length=1 << 20)]
MAX_TEXTS = MAX_ITEMS


class LengthRequest(Parameters, kw_only=True):
    """How much is still to come after each text? Give `input`, `prompt` or `messages`."""

    endpoint: ClassVar[Endpoint] = "length"
    input: Texts | None = None
    """What stands there so far, prompt and answer: a text, several texts, one list of token ids, or several such lists."""
    prompt: Texts | None = None
    """The same, or with `partial` the one prompt, text or token ids, that all partial answers belong to."""
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    """A conversation whose answer begins."""
    partial: Texts | None = None
    """With `prompt` or `messages`: what stands there of the answer, or of several answers. Text, or token ids where `prompt` is."""
    gamma: Gamma | None = None
    """The discount by which values become tokens; the length model's own unless given."""
    chat_template_kwargs: dict[str, Any] | None = None
    """With `messages`: more variables for the model's chat template."""
    model: str | None = None
    """The model's name; may be left out where only one is served."""
    priority: Priority | None = None
    """Lower runs earlier; 0 unless given."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. Unless given: true in texts, false in `messages`."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """What the length model says after one text."""

    index: int
    """Number of the text in the request."""
    value: float
    """The mean of 1 − gamma^(tokens to come), from 0 (the text ends) to 1."""
    remaining_tokens: float
    """The value as tokens, ln(1 − value) / ln(gamma), the ending one included: a proxy that lies below the mean length."""


class LengthResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry a text, in the order of the request."""

    id: str
    object: Literal["length"] = "length"
    created: int
    """Seconds since 1970."""
    model: str
    gamma: float
    """By which values became tokens."""
    data: list[Remaining]
    usage: Usage
