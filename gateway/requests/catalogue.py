"""``/v1/catalogues``, and the queries of requests that name items of a catalogue.

What such a request needs besides its body, an :class:`Opened`, comes with the message to the worker.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.presets.preset import Preset
from yardstick_llm.gateway.requests.endpoint import MAX_FIELDS_BYTES, Endpoint, Model
from yardstick_llm.gateway.requests.pairs import preset_of
from yardstick_llm.gateway.schemas.common import MAX_ITEMS, Usage
from yardstick_llm.gateway.schemas.parameters import EndpointName, Parameters, TokenId
from yardstick_llm.gateway.text.catalogue import ITEM, QUERY, Frame, ItemTooLong, Template, TemplateError, packed, template_of
from yardstick_llm.gateway.text.prepared import Prepared, TooManyTokens
from yardstick_llm.gateway.text.tokenizer import Tokenizer

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


MAX_TEMPLATE = 8192
"""Most characters of a template."""
MAX_LABEL = 64
DEFAULT_TEMPLATE = ITEM + QUERY
NAMING_BYTES = MAX_FIELDS_BYTES + MAX_ITEMS * (MAX_ID + 2)
"""Most bytes of the fields of a request that names items: as many ids as it may have, each with two bytes before it. Decoding them
takes the event loop less than a millisecond."""


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A catalogue, as far as workers need it."""

    template: Template
    tails: list[bytes] = []
    """Distinct tails of the request's items, as UTF-8."""


class Records(msgspec.Struct, frozen=True, array_like=True):
    """Items to register: the answer of a worker, in :attr:`Prepared.response`."""

    items: list[tuple[str, bytes]]
    """Ids, without repetitions, and records (``gateway/text/catalogue.py``)."""
    tokens: int


def opened(model: Model) -> Opened:
    """Return what came with the message."""
    return msgspec.msgpack.decode(model.earlier, type=Opened)


def query_prompts(query: str | list[int], labels: list[int], model: Model) -> Prepared:
    """Return the tokens behind each distinct tail as rows, and those that all prompts share as suffix."""
    if isinstance(query, list):
        model.facts.check_ids(query, "query")
        model.facts.check_prompt(len(query), "query")
    catalogue = opened(model)
    tails = [tail.decode() for tail in catalogue.tails]
    try:
        frame = _frame(catalogue.template, model.texts.tokenizer)
        rows, suffix, cut = frame.seams(tails, query, model.facts.context, model.bounds)
    except TooManyTokens as error:
        raise model.facts.too_long(error, "query") from None
    return Prepared(rows, (), suffix, labels, query_truncated=cut)


def _frame(template: Template, tokenizer: Tokenizer) -> Frame:
    try:
        return Frame(template, tokenizer)
    except TemplateError as error:
        raise InvalidRequest(f"`template`: {error}.", param="template") from None


def requested_template(request: CatalogueRequest, preset: Preset | None) -> Template:
    """Return the template of a new catalogue. ``preset``: the model's, if the request asks for it. Raises
    :class:`InvalidRequest`."""
    if preset is None:
        given = DEFAULT_TEMPLATE if request.template is None else request.template
        return Template((given,) if isinstance(given, str) else tuple(given), request.add_special_tokens is not False)
    wrong = next((name for name in ("template", "labels", "add_special_tokens") if getattr(request, name) is not None), None)
    if wrong is not None:
        raise InvalidRequest(f"`{wrong}` does not go with `preset`.", param=wrong)
    try:
        return template_of(preset)
    except TemplateError as error:
        raise InvalidRequest(f"`preset`: {error}.", param="preset") from None


def _create(request: CatalogueRequest, model: Model) -> Prepared:
    """Check the template; return the ids of the labels."""
    tokenizer, preset = model.texts.tokenizer, preset_of(model, "rerank") if request.preset else None
    template = requested_template(request, None if preset is None else preset.preset)
    param = "template" if preset is None else "preset"
    if sum(map(len, template.pieces)) > MAX_TEMPLATE:
        raise InvalidRequest(f"`{param}`: the template has more than {MAX_TEMPLATE} characters.", param=param)
    try:
        if preset is not None and tokenizer.controls.divide(preset.preset.instruction) != [preset.preset.instruction]:
            raise TemplateError("the instruction contains a control token")
        Frame(template, tokenizer).check(template)
    except TemplateError as error:
        raise InvalidRequest(f"`{param}`: {error}.", param=param) from None
    return Prepared([], labels=_labels(request, model) if preset is None else list(chain.from_iterable(preset.fitted.labels)))


def _labels(request: CatalogueRequest, model: Model) -> list[int]:
    labels = []
    for index, text in enumerate(request.labels or []):
        ids = model.texts.tokenizer.encode(text[: MAX_LABEL + 1], add_special_tokens=False)
        if len(ids) != 1 or len(text) > MAX_LABEL:
            message = f"`labels[{index}]`: {text[:100]!r} is not one token of {model.facts.name!r}."
            raise InvalidRequest(message, param=f"labels[{index}]")
        labels += ids
    if len(labels) > model.facts.max_labels:
        raise InvalidRequest(f"`labels` has {len(labels)} labels; at most {model.facts.max_labels} are allowed.", param="labels")
    return labels


def _register(request: ItemsRequest, model: Model) -> Prepared:
    """Tokenise items. Of items with equal ids the last one counts."""
    items = {item.id: (index, item) for index, item in enumerate(request.items)}
    texts: list[str | list[int]] = []
    for index, item in items.values():
        if (item.text is None) == (item.token_ids is None):
            raise InvalidRequest(f"`items[{index}]`: give either `text` or `token_ids`.", param=f"items[{index}]")
        if item.token_ids is not None:
            model.facts.check_ids(item.token_ids, f"items[{index}].token_ids")
        texts.append(item.text if item.text is not None else item.token_ids or [])
    places = [index for index, _ in items.values()]
    frame = _frame(opened(model).template, model.texts.tokenizer)
    characters = sum(len(text) for text in texts if isinstance(text, str)) + len(texts) * frame.around_item
    model.bounds.check("max_request_characters", characters, "characters that must be tokenised", "items")
    room = model.facts.context - frame.around_query - 1  # for a query of one token
    try:
        stored = frame.store(texts, room)
    except ItemTooLong as error:
        remedy = "Shorten it: a query must fit behind it."
        raise model.facts.too_long(error.tokens, f"items[{places[error.index]}]", remedy=remedy) from None
    tokens = sum(each.tokens for each in stored)
    model.bounds.check("max_request_tokens", tokens, "tokens", "items")
    records = Records([(id, packed(each.ids, each.tail)) for id, each in zip(items, stored, strict=True)], tokens)
    return Prepared([], response=memoryview(msgspec.msgpack.encode(records)))


class _ItemsEndpoint(Endpoint[ItemsRequest]):
    """Reads a JSON array or JSON lines in place of an object."""

    def decode(self, body: bytes) -> tuple[ItemsRequest, list[str]]:
        """See :class:`Endpoint`."""
        text = bytes(body).strip()
        if text and not text.startswith(b"["):  # a text in JSON contains no line break
            text = b"[" + b",".join(line for line in text.splitlines() if line.strip()) + b"]"
        return super().decode(text and b'{"items":' + text + b"}")


CATALOGUE = Endpoint(
    kind=CatalogueRequest,
    bulk={},
    read=_create,
    characters=lambda request, _: sum(map(len, request.template or ())) + sum(map(len, request.labels or ())),
)
CATALOGUE_ITEMS = _ItemsEndpoint(
    kind=ItemsRequest,
    bulk={"items": [CatalogueItem("0", text="")]},
    read=_register,
    characters=lambda request, _: sum(len(item.text or "") for item in request.items),
)
