"""Fields by which a request allows long texts to be cut."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gateway.schemas.parameters import Parameters

MAX_ITEMS = 10_000
"""Most items, documents or texts of a request."""

CUTS = ("truncate", "truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query")
"""Fields that cut texts."""

CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
CatalogueIds = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
MaxTokens = Annotated[int, msgspec.Meta(ge=0)]
Side = Literal["left", "right", "middle", "Left", "Right"]


class ItemError(msgspec.Struct, frozen=True, kw_only=True):
    """Why an item of a request with `partial_results` has no result."""

    index: int
    """Index of the item in the request."""
    message: str
    type: str
    """Family of the error, as in an error body."""
    code: str | None = None


class Truncation(Parameters, kw_only=True):
    """Fields that allow long texts to be cut. Without them, a text that is too long is an error. A template is never cut."""

    truncate: bool | None = None
    """Cut documents so that each prompt fits into the model's context."""
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
        return (self.truncation_side or self.truncation_direction or "right").lower()
