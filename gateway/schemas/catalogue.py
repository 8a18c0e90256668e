"""Bodies of ``/v1/catalogues``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.parameters import EndpointName, Parameters, TokenId
from gateway.schemas.usage import Usage

MAX_REGISTERED = 2000
"""Most items of one registration; the event loop needs about a millisecond for their records."""
MAX_ID = 128
TTL = Annotated[float, msgspec.Meta(gt=0, le=366 * 86_400)]
ItemId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}\Z")]
Piece = Annotated[str, msgspec.Meta(max_length=8192)]


class CatalogueRequest(Parameters, kw_only=True):
    """Create a catalogue. Its model, template and labels never change."""

    endpoint: ClassVar[EndpointName] = "catalogue"
    model: str | None = None
    """Name of the model; optional if only one is served."""
    preset: bool = False
    """Take template, labels and the formula of `/v1/rerank` from the model's preset, which must put the document before the
    query. Its default instruction is used."""
    template: Piece | Annotated[list[Piece], msgspec.Meta(min_length=1, max_length=16)] | None = None
    """The prompt, with `{item}` and behind it `{query}`; `{item}{query}` by default. Pieces of a list are tokenised by themselves;
    inside a piece, tokens may span the places where texts meet. Control tokens of the template are control tokens; items and
    queries are plain text."""
    add_special_tokens: bool | None = None
    """Add the tokens, such as BOS, that the tokeniser puts around every text; true by default."""
    labels: Annotated[list[str], msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Texts of one token each, which are read for requests that name none. `/v1/rerank` needs them: the relevance is the
    probability of the first one among them."""
    ttl_seconds: TTL | None = None
    """Time after which an item expires that is not registered again; never by default."""


class CatalogueItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item to register. Give `text` or `token_ids`."""

    id: ItemId
    """Up to 128 ASCII letters, digits, and `._:@/+=-`; the first is a letter or digit."""
    text: str | None = None
    token_ids: list[TokenId] | None = None


class ItemsRequest(Parameters, kw_only=True):
    """Register items: a JSON array of objects with `id` and `text` or `token_ids`, or one such object on each line (JSONL). An item
    with a known id is replaced."""

    endpoint: ClassVar[EndpointName] = "catalogue_items"
    items: Annotated[list[CatalogueItem], msgspec.Meta(min_length=1, max_length=MAX_REGISTERED)]


class CatalogueBody(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogue."""

    id: str
    """Its name."""
    object: Literal["catalogue"] = "catalogue"
    model: str
    preset: str | None
    """Name of the preset that template and labels come from; null without `preset`."""
    template: list[str]
    add_special_tokens: bool
    labels: list[str]
    ttl_seconds: float | None
    items: int
    """Number of items. Items that have expired may count for a while."""
    tokens: int
    """Stored tokens of these items. Four bytes of texts whose tokens depend on the query count as one."""
    bytes: int
    """Bytes of the store that the catalogue takes."""
    version: str
    """Changes with every change of an item."""


class CatalogueList(msgspec.Struct, frozen=True, kw_only=True):
    """All catalogues of the key's trust group."""

    object: Literal["list"] = "list"
    data: list[CatalogueBody]


class ItemBody(msgspec.Struct, frozen=True, kw_only=True):
    """A registered item."""

    id: str
    version: str
    """Digest of its tokens: equal items have equal versions."""
    tokens: int
    """Stored tokens; one or a few at its end may be missing, because they depend on the query."""


class ItemPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some items of a catalogue, in the order of their last change."""

    object: Literal["list"] = "list"
    data: list[ItemBody]
    next: str | None
    """Value of `after` for the next page; null at the end."""


class RegisteredItems(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a registration."""

    object: Literal["catalogue.items"] = "catalogue.items"
    catalogue: str
    added: int
    changed: int
    unchanged: int
    """Items that were registered before with the same content; their cached keys, values and scores stay valid."""
    version: str
    usage: Usage


class DeletedItems(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a deletion of items."""

    object: Literal["catalogue.items.deleted"] = "catalogue.items.deleted"
    catalogue: str
    deleted: int


class DeletedCatalogue(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a deletion."""

    id: str
    object: Literal["catalogue.deleted"] = "catalogue.deleted"
    deleted: bool = True
