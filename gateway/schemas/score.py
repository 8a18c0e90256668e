"""Bodies of ``/v1/score``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.parameters import Endpoint, Parameters
from gateway.schemas.usage import Usage

MAX_ITEMS = 10_000

CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class ScoreRequest(Parameters, kw_only=True):
    """Score every item against one query: the probability of each label as the next token after query and item."""

    endpoint: ClassVar[Endpoint] = "score"
    query: str | list[int]
    """The common part of all prompts, as text or token ids."""
    items: str | Annotated[list[str | list[int]], msgspec.Meta(max_length=MAX_ITEMS)]
    """Items to score, of the same kind as the query: texts, or lists of token ids. One text means a list of one."""
    label_token_ids: list[int] | None = None
    """Token ids to score. Give either these or `labels`."""
    labels: list[str] | None = None
    """Texts to score; each must be one token of the model."""
    apply_softmax: bool | None = False
    """Scale the scores of an item so that they sum to 1 over the labels, instead of over the whole vocabulary."""
    item_first: bool | None = False
    """Put the item before the query in the prompt."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token; true by default. Texts often contain a rendered template."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Scores in the order of the items."""

    id: str
    object: Literal["scoring"] = "scoring"
    created: int
    """Seconds since 1970."""
    model: str
    scores: list[list[float]]
    """One list for each item, with the probability of each label."""
    usage: Usage
