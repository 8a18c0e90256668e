"""Content that may have images: in messages, and as queries, items and documents."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gateway.schemas.parameters import TokenId
from gateway.schemas.truncation import MAX_ITEMS


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
