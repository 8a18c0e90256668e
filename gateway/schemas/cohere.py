"""Bodies of Cohere's ``/v1/embed`` and ``/v2/embed``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.parameters import EndpointName, Parameters
from gateway.schemas.rerank import ApiVersion
from gateway.schemas.truncation import MAX_ITEMS, Priority, Truncation

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
InputType = Literal["search_query", "search_document", "classification", "clustering"]


class CohereEmbedRequest(Parameters, kw_only=True):
    """Embed texts, in the form of Cohere."""

    endpoint: ClassVar[EndpointName] = "cohere_embed"
    texts: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    """Texts to embed."""
    input_type: InputType | None = None
    """`search_query` puts the preset's instruction before each text; the others embed the texts as documents."""
    embedding_types: Annotated[list[EmbeddingType], msgspec.Meta(min_length=1, max_length=4)] | None = None
    """Forms of the embeddings: numbers, base64 of float32 in little-endian order, or the signs as bits, eight in a number of 0
    to 255 (`ubinary`) or of -128 to 127 (`binary`). By default `float`."""
    output_dimension: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Length of the embeddings: their first numbers are kept (Matryoshka). The model's size by default."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Cut each text to this many tokens."""
    truncate: Literal["NONE", "START", "END"] | None = "END"
    """Where texts that are longer than the model's context are cut; with `NONE` they are errors."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""

    @property
    def cuts(self) -> Truncation:
        """How the texts are cut."""
        side = self.truncate or "END"
        return Truncation(
            truncate=side != "NONE", truncation_direction="left" if side == "START" else "right", max_tokens_per_doc=self.max_tokens
        )


class EmbedUnits(msgspec.Struct, frozen=True):
    """Part of Cohere's answer."""

    input_tokens: int


class EmbedMeta(msgspec.Struct, frozen=True):
    """Part of Cohere's answer."""

    api_version: ApiVersion
    billed_units: EmbedUnits


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of the texts, in their order."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | dict[str, list[str | list[float]]]
    """By type; from `/v1/embed` without `embedding_types`, lists of numbers."""
    texts: list[str]
    meta: EmbedMeta
