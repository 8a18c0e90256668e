"""Fields and answers that several endpoints share."""

from __future__ import annotations

import os
import random
from typing import Annotated, Literal

import msgspec

from yardstick_llm.gateway.schemas.parameters import Parameters, TokenId

MAX_ITEMS = 10_000
"""Most items, documents or texts of a request."""

CUTS = ("truncate", "truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query")
"""Fields that cut texts."""

CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
CatalogueIds = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
MaxTokens = Annotated[int, msgspec.Meta(ge=0)]
Side = Literal["left", "right", "middle", "Left", "Right"]
EndOfText = Literal["NONE", "START", "END"]
"""Where texts are cut, in the words of Cohere and NVIDIA; `NONE`: not at all."""


class ItemError(msgspec.Struct, frozen=True, kw_only=True):
    """Why an item of a request with `partial_results` has no result."""

    index: int
    """Index of the item in the request."""
    message: str
    type: str
    """Family of the error, as in an error body."""
    code: str | None = None


class ModelRequest(Parameters, kw_only=True):
    """Fields of all requests that a model computes."""

    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class Truncation(ModelRequest, kw_only=True):
    """Fields that allow long texts to be cut. Without them, a text that is too long is an error. A template is never cut."""

    truncate: bool | EndOfText | None = None
    """Cut documents so that each prompt fits into the model's context. In the form of NVIDIA, `END` and `START` are true and name
    the end, and `NONE` is false."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """Cut documents so that each prompt has at most this many tokens; -1 means the model's context."""
    max_tokens_per_doc: MaxTokens | None = None
    """Cut each document to this many tokens; 0 means that the request does not limit it."""
    max_tokens_per_query: MaxTokens | None = None
    """Cut the query to this many tokens; 0 means that the request does not limit it."""
    truncation_direction: Side | None = None
    """The end at which texts are cut, `right` by default; with `middle`, a text keeps its beginning and its end."""
    truncation_side: Side | None = None
    """`truncation_direction` in the form of vLLM, which it replaces if both are given."""

    @property
    def side(self) -> str:
        """The end at which texts are cut, in lower case."""
        at_start = "left" if self.truncate == "START" else "right"
        return (self.truncation_side or self.truncation_direction or at_start).lower()

    @property
    def may_cut(self) -> bool | None:
        """Whether `truncate` allows cutting; None if the request does not say."""
        return None if self.truncate is None else self.truncate not in (False, "NONE")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that were not computed, because their result or their keys and values were cached."""


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    reasoning_tokens: int
    """Tokens of the thinking section, with its tags."""
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the completion that prompt lookup had drafted; only if there were drafts."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Drafted tokens that are not in the completion. They do not count as completion tokens."""


class ItemUsage(msgspec.Struct, frozen=True):
    """Token counts of each item that has a result, as lists of equal length."""

    index: list[int]
    """Index of the item in the request."""
    prompt_tokens: list[int]
    """Tokens of the item's prompt: query and item."""
    computed_tokens: list[int]
    """Tokens of the item that engines computed for this request: none if its result was reused, or if an equal item came before it.
    Tokens of the query are not among them, because engines compute them once for all items."""
    reused: list[bool]
    """Whether the result was in the cache, or computed for another request at the same time."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    """Tokens of all prompts; for scoring, query and item of every item."""
    total_tokens: int
    """Prompt tokens plus completion tokens."""
    completion_tokens: int | None = None
    """Generated tokens, including the one that ends a completion."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """Number of cached prompt tokens."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """Number of tokens of thinking sections, for models that think, and of drafted tokens."""


NAMES_OF_VLLM = ("use_activation", "activation", "softmax")
"""Names of one field in the versions of vLLM."""


class Activation(Truncation, kw_only=True):
    """Fields by which a request asks for the numbers before the preset's activation."""

    raw_scores: bool | None = None
    """Return the logit before the preset's activation."""
    use_activation: bool | None = None
    """False means `raw_scores`, in the form of vLLM."""
    activation: bool | None = None
    """An older name of `use_activation`."""
    softmax: bool | None = None
    """An older name of `use_activation`."""

    @property
    def raw(self) -> bool:
        """Whether logits are asked for."""
        return bool(self.raw_scores) or any(getattr(self, name) is False for name in NAMES_OF_VLLM)


def usage_of_prompts(tokens: int, cached_tokens: int) -> Usage:
    """Return the token counts of a request that generates nothing."""
    return Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(cached_tokens))


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer: text for the model."""

    refusal: str

    @property
    def text(self) -> str:
        """The refusal."""
        return self.refusal


class ImageUrl(msgspec.Struct):
    """Place of an image."""

    url: str
    """A data URL with base64 (`data:image/png;base64,...`), or an `http` or `https` URL of a host that the server allows."""
    detail: Literal["auto", "low", "high"] | None = None
    """`low`: reduce the image to at most 256 tokens. Otherwise it has as many as the model's settings allow."""


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image; only with models that read images."""

    image_url: ImageUrl | str

    @property
    def url(self) -> str:
        """The data URL, or the `http` or `https` URL."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url

    @property
    def low(self) -> bool:
        """Whether a small version is enough."""
        return isinstance(self.image_url, ImageUrl) and self.image_url.detail == "low"


Part = TextPart | ImagePart
MessagePart = Part | RefusalPart


class Content(msgspec.Struct):
    """Content as an object with exactly one of these fields."""

    content: list[Part] | None = None
    """Parts, in vLLM's form."""
    text: str | None = None
    image: str | None = None
    """URL of an image, or its base64 without a URL, in Jina's form."""


Paired = str | Content | Annotated[list[str | Content], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
Query = str | list[TokenId | Part] | Content
PAIRED_QUERIES = ("text_1", "queries", "data_1")
"""Names of the queries of pairs."""
PAIRED_DOCUMENTS = ("text_2", "documents", "data_2")
"""Names of the documents of pairs. With `queries`, `items` is another one."""


_random = random.Random()  # its own, so that a program that seeds the module's generator repeats no ids
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """Return 128 random bits in hexadecimal. Ids protect nothing, so they need no randomness from the operating system."""
    return f"{_random.getrandbits(128):032x}"
