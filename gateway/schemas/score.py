"""Bodies of ``/v1/score``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.activation import Activation
from gateway.schemas.content import PAIRED_DOCUMENTS, PAIRED_QUERIES, Paired, Query
from gateway.schemas.parameters import EndpointName
from gateway.schemas.truncation import MAX_ITEMS, CacheSalt, CatalogueIds, ItemError, Priority
from gateway.schemas.usage import ItemUsage, Usage

TopN = Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)]


class ScoreRequest(Activation, kw_only=True):
    """Score every item against one query: the probability of each label as the next token after query and item. Or, with `text_1`
    and `text_2`, score pairs of texts as the model's preset prescribes."""

    endpoint: ClassVar[EndpointName] = "score"
    query: Query | None = None
    """The common part of all prompts, as text, token ids, or content with images: a list of parts or an object."""
    items: str | Annotated[list[Query], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    """Items to score, of the same kind as the query: texts and contents, or lists of token ids. One text means a list of one. With
    `queries`: another name of `text_2`."""
    catalogue: str | None = None
    """Name of a catalogue: its items are scored in place of `items`, as its template prescribes."""
    ids: CatalogueIds | None = None
    """With `catalogue`: ids of items. Without it, all items of the catalogue are scored; set `top_n` or `stream`."""
    top_n: TopN | None = None
    """With `catalogue`: return the items with the highest scores of the first label only, the highest first, with their `ids`."""
    text_1: Paired | None = None
    """A query, or a query for each text of `text_2`. This and the next five fields are vLLM's form: the answer is `data`, with one
    score for each pair."""
    text_2: Paired | None = None
    """A document, or several."""
    queries: Paired | None = None
    """Another name of `text_1`."""
    documents: Paired | None = None
    """Another name of `text_2`."""
    data_1: Paired | None = None
    """Another name of `text_1`."""
    data_2: Paired | None = None
    """Another name of `text_2`."""
    instruction: str | None = None
    """With pairs: the instruction for the model; the preset's own by default."""
    label_token_ids: list[int] | None = None
    """Token ids to score. Give either these or `labels`."""
    labels: list[str] | None = None
    """Texts to score; each must be one token of the model."""
    readout: Literal["labels", "likelihood"] | None = "labels"
    """The result for each item: the probability of each label as the next token, or the log-probability of the item's own tokens
    after the query (`likelihood`), which needs no labels."""
    return_token_logprobs: bool | None = False
    """With `likelihood`: also return the log-probability of each token of an item."""
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
    stream: bool | None = False
    """Send results as they become known, as server-sent events."""
    partial_results: bool | None = False
    """Answer with the results that there are, and an error for each item without one, instead of one error for the request."""
    return_item_usage: bool | None = False
    """Return the token counts of each item, and whether its result was reused. A stream has them at its end."""
    user: str | None = None
    """Accepted for compatibility and not used."""

    @property
    def paired(self) -> bool:
        """Whether the request has vLLM's form."""
        return any(getattr(self, name) is not None for name in (*PAIRED_QUERIES, *PAIRED_DOCUMENTS))


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scores in the order of the items."""

    id: str
    object: Literal["scoring"]
    created: int
    """Seconds since 1970."""
    model: str
    scores: list[list[float] | None]
    """One list for each item, with the probability of each label; null for an item in `errors`."""
    usage: Usage
    ids: list[str] = []
    """Only with `catalogue`: the item of each list."""
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    errors: list[ItemError] = []
    """Items without scores, with `partial_results`."""


class ItemScores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of one item, in a stream."""

    index: int
    scores: list[float]
    id: str | msgspec.UnsetType = msgspec.UNSET
    """Only with `catalogue`."""


class ScoreChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: scores of some items, in no order."""

    id: str
    object: Literal["scoring.chunk"] = "scoring.chunk"
    data: list[ItemScores]


class ItemLikelihood(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The log-probability of one item after the query."""

    index: int
    logprob: float
    """Sum over the item's tokens. -9999 or less represents a probability of zero."""
    mean_logprob: float
    """Mean over the item's tokens."""
    tokens: int
    """Number of the item's tokens."""
    is_greedy: bool
    """Whether each token is the most probable one at its place: greedy decoding would write this item."""
    token_logprobs: list[float] | None = None
    """The log-probability of each token, with `return_token_logprobs`."""


class LikelihoodChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: likelihoods of some items, in no order."""

    id: str
    object: Literal["likelihood.chunk"] = "likelihood.chunk"
    data: list[ItemLikelihood]


class Likelihoods(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Likelihoods in the order of the items."""

    id: str
    object: Literal["likelihood"]
    created: int
    """Seconds since 1970."""
    model: str
    data: list[ItemLikelihood]
    usage: Usage
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    errors: list[ItemError] = []
    """Items without a likelihood, with `partial_results`."""


class PairScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float
    """Greater is more relevant. The preset says in which range."""


class PairChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: scores of some pairs, in no order."""

    id: str
    object: Literal["list.chunk"] = "list.chunk"
    data: list[PairScore]


class PairScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scores of pairs, in the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    """Seconds since 1970."""
    model: str
    data: list[PairScore]
    usage: Usage
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    errors: list[ItemError] = []
    """Pairs without a score, with `partial_results`."""
