"""Bodies of ``/v1/embeddings``, in OpenAI's form, and of ``/embed``, in the form of Text Embeddings Inference (TEI)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.length import Texts
from gateway.schemas.parameters import EndpointName
from gateway.schemas.truncation import CacheSalt, Priority, Truncation
from gateway.schemas.usage import Usage


class EmbeddingsRequest(Truncation, kw_only=True):
    """Embed texts."""

    endpoint: ClassVar[EndpointName] = "embeddings"
    input: Texts | None = None
    """A text, several texts, one list of token ids, or several such lists. Token ids are complete prompts."""
    inputs: Texts | None = None
    """`input` in the form of TEI."""
    input_type: Literal["query", "document"] | None = None
    """`query` puts the preset's instruction before each text; `document` is the default."""
    prompt_name: Literal["query", "document"] | None = None
    """`input_type` in the form of TEI."""
    instruction: str | None = None
    """Instruction for queries; the preset's own by default. It implies `input_type` `query`."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is that of the numbers as float32 in little-endian order."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Length of the embeddings: their first numbers are kept (Matryoshka). The model's size by default."""
    normalize: bool | None = True
    """Scale embeddings to length 1."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class EmbeddingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one text."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: tuple[float, ...] | str
    """Numbers, or base64 text."""


class EmbeddingsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each text, in the order of the request."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: Usage
