"""``/v1/rerank``, ``/v2/rerank`` and ``/v1/ranking``: query and documents to token ids."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.requests.catalogue import NAMING_BYTES, query_prompts
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.requests.images import reading_content, text_of
from yardstick_llm.gateway.requests.pairs import Pairs, preset_of, to_compare
from yardstick_llm.gateway.schemas.common import (
    CUTS,
    MAX_ITEMS,
    Activation,
    CatalogueIds,
    Content,
    ItemError,
    ItemUsage,
    Usage,
)
from yardstick_llm.gateway.schemas.parameters import EndpointName
from yardstick_llm.gateway.text.cuts import may_be_cut
from yardstick_llm.gateway.text.prepared import Prepared


class TextDocument(msgspec.Struct, frozen=True):
    """A document as an object. Other fields are ignored."""

    text: str


Documents = Annotated[list[str | Content], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]


class RerankRequest(Activation, kw_only=True):
    """Order documents by their relevance to a query."""

    endpoint: ClassVar[EndpointName] = "rerank"
    query: str | Content
    """A text, or an object with `text`, `image` or `content`."""
    documents: Documents | None = None
    """Documents: texts, or objects with `text`, `image` (Jina's form) or `content` (a list of parts, vLLM's form)."""
    texts: Documents | None = None
    """The form of TEI: used instead of `documents`, it makes the answer a bare list."""
    passages: Documents | None = None
    """The form of NVIDIA: used instead of `documents`, it makes the answer `rankings`, with logits."""
    catalogue: str | None = None
    """Name of a catalogue with labels: its items are ranked in place of `documents`, as its template prescribes."""
    ids: CatalogueIds | None = None
    """With `catalogue`: ids of items; all of the catalogue by default, with `top_n` or `stream`."""
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of results; all by default, or with 0."""
    return_documents: bool | Literal["true", "false"] | None = None
    """Repeat each document in its result. RAGFlow sends the text `true`."""
    return_text: bool | None = None
    """`return_documents` in the form of TEI."""
    instruction: str | None = None
    """Instruction for the model; the preset's own by default."""
    instruct: str | None = None
    """Another name of `instruction`."""
    stream: bool | None = False
    """Send results as they become known, as server-sent events."""
    partial_results: bool | None = False
    """Answer with the results that there are, and an error for each item without one, instead of one error for the request."""
    return_item_usage: bool | None = False
    """Return the token counts of each item, and whether its result was reused. A stream has them at its end."""


class RerankResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document."""

    index: int
    """Index of the document in the request; of an item of a whole catalogue, its place in the order of scoring."""
    id: str | msgspec.UnsetType = msgspec.UNSET
    """Only with `catalogue`."""
    relevance_score: float
    """Greater is more relevant. The preset says in which range."""
    document: TextDocument | None = None


class ApiVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version of Cohere's interface that the answer follows."""

    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True, kw_only=True):
    """Part of Cohere's answer."""

    search_units: int = 1


class RerankTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts in Cohere's answer."""

    input_tokens: int
    output_tokens: int = 0


class RerankMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Part of Cohere's answer, and what was cut."""

    api_version: ApiVersion = msgspec.field(default_factory=ApiVersion)
    billed_units: BilledUnits = msgspec.field(default_factory=BilledUnits)
    tokens: RerankTokens
    truncated: list[int] = []
    """Indices of the documents that were cut."""
    query_truncated: bool = False
    """Whether the query was cut."""


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Results, the most relevant document first."""

    id: str
    object: Literal["rerank"]
    created: int
    """Seconds since 1970."""
    model: str
    results: list[RerankResult]
    usage: Usage
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    meta: RerankMeta
    errors: list[ItemError] = []
    """Documents without a result, with `partial_results`."""


class RerankChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: results of some documents, in no order."""

    id: str
    object: Literal["rerank.chunk"] = "rerank.chunk"
    results: list[RerankResult]


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """One document in the form of NVIDIA."""

    index: int
    logit: float
    """The score before the preset's activation."""


class Rankings(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the form of NVIDIA, the most relevant document first."""

    rankings: list[Ranking]
    usage: Usage


class TeiRank(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document in the form of TEI, whose answer is a list of these."""

    index: int
    score: float
    text: str | None = None


LISTS = ("documents", "texts", "passages")
"""Fields of which one has the documents."""
WITHOUT_CATALOGUE = (
    *LISTS,
    "return_documents",
    "return_text",
    "instruction",
    "instruct",
    "partial_results",
    *CUTS,
)
"""Fields that requests for items of a catalogue must not have: their prompts were made when the items were registered."""


def _read(request: RerankRequest, model: Model) -> Prepared:
    if request.catalogue is not None:
        request.refuse(WITHOUT_CATALOGUE, "does not go with `catalogue`.")
        return query_prompts(text_of(request.query), [], model)
    if len(lists := {name: given for name in LISTS if (given := getattr(request, name)) is not None}) != 1:
        raise InvalidRequest("Give either `documents`, `texts` or `passages`.", param="documents")
    if request.instruction is not None and request.instruct is not None:
        raise InvalidRequest("Give either `instruction` or `instruct`.", param="instruct")
    instruction = request.instruct if request.instruction is None else request.instruction
    ((param, given),) = lists.items()
    documents = [*map(text_of, given)]
    partial = bool(request.partial_results)
    preset, texts = preset_of(model, "rerank"), request.return_documents in (True, "true") or bool(request.return_text)
    if preset.preset.task == "embed":
        asked = ("query", [text_of(request.query)])
        return to_compare(model, preset, request, asked, (param, documents), instruction, texts=texts, partial=partial)
    pairs = Pairs(model, preset, request, param, text_of(request.query), instruction, partial=partial)
    return pairs.prepared(documents, texts=texts)


def _characters(request: RerankRequest, query_once: bool) -> int:
    if request.catalogue is not None:
        return len(text_of(request.query))
    documents, query = request.documents or request.texts or request.passages or [], text_of(request.query)
    texts = sum(len(text_of(document)) for document in documents)
    return texts + len(query) * (2 if query_once and may_be_cut(query) else len(documents))


RERANK = reading_content(
    Endpoint(
        kind=RerankRequest,
        bulk={"query": "", "documents": [""], "texts": [""], "passages": [""], "instruction": "", "instruct": "", "user": ""},
        read=_read,
        characters=_characters,
        most_fields_bytes=NAMING_BYTES,
    )
)
