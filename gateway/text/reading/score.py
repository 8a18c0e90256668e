"""``/v1/score``: query, items and labels to token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from gateway.errors import InvalidRequest
from gateway.schemas.score import ScoreRequest
from gateway.text.bounds import TooManyTokens
from gateway.text.cuts import may_be_cut
from gateway.text.prepared import Prepared, Refusal
from gateway.text.prompts import (
    EmptyPromptError,
    ItemsAndSuffix,
    PrefixAndBranches,
    PromptTooLongError,
    join_ids,
    share_prefix,
    tokenise_items,
    tokenise_pairs,
)
from gateway.text.reading.catalogue import query_prompts
from gateway.text.reading.endpoint import Endpoint, Model
from gateway.text.reading.labels import labels_of
from gateway.text.reading.likelihood import check_fields, likelihood_prompts, own_tokens
from gateway.text.reading.pairs import SEAM_TOKENS, Pairs, preset_of

ONLY_PAIRED = ("instruction", "truncate", "truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query")
"""Fields that only pairs of texts may have."""
LIGHT_ITEMS = 500


def _read(request: ScoreRequest, model: Model) -> Prepared:
    if request.return_token_logprobs and request.readout != "likelihood":
        raise InvalidRequest("`return_token_logprobs` goes with the readout `likelihood`.", param="return_token_logprobs")
    if request.catalogue is not None:
        return _of_catalogue(request, model)
    if request.paired:
        if request.readout == "likelihood":
            raise InvalidRequest("The readout `likelihood` goes with `query` and `items`.", param="readout")
        return _pairs(request, model)
    if request.query is None or request.items is None:
        missing = "query" if request.query is None else "items"
        raise InvalidRequest(f"`{missing}` is missing; give `query` and `items`, or `text_1` and `text_2`.", param=missing)
    cut = next((name for name in ONLY_PAIRED if getattr(request, name) is not None and getattr(request, name) is not False), None)
    if cut is not None:
        raise InvalidRequest(
            f"`{cut}` goes with `text_1` and `text_2`; a prompt of `query` and `items` is never changed.", param=cut
        )
    items = [request.items] if isinstance(request.items, str) else request.items
    if request.readout == "likelihood":
        return _likelihoods(request, model, request.query, items)
    labels = labels_of(request, model)
    model.bounds.check("max_scores", len(items) * len(labels), "scores (items and labels)", "items")
    _check_kinds(request.query, items)
    refused: list[Refusal] = []
    if request.partial_results:
        items, refused = _fitting(request.query, model, items)
    try:
        if request.item_first:
            rows, suffix = _items_first(request, model, request.query, items)
            prefix: list[int] = []
        else:
            suffix = []
            if isinstance(request.query, str):
                prefix, rows = _texts(request, model, request.query, items)
            else:
                prefix, rows = _ids(model, request.query, items)
    except EmptyPromptError as error:
        raise InvalidRequest(f"{error}.", param=f"items[{error.index}]") from None
    tokens = len(prefix) + sum(map(len, rows)) + len(suffix) * len(rows)
    model.bounds.check("max_request_tokens", tokens, "tokens", "items")
    return Prepared(rows, prefix, suffix, labels, param="items[]", refused=refused)


WITHOUT_CATALOGUE = ("items", "text_1", "text_2", "queries", "documents", "partial_results", "parse_special_tokens")
"""Fields that requests for items of a catalogue must not have, besides :data:`ONLY_PAIRED`."""


def _of_catalogue(request: ScoreRequest, model: Model) -> Prepared:
    """Read the query and the labels; no labels are read for a request that leaves them to the catalogue."""
    given = next((name for name in (*WITHOUT_CATALOGUE, *ONLY_PAIRED) if getattr(request, name) not in (None, False)), None)
    if given is not None:
        raise InvalidRequest(f"`{given}` does not go with `catalogue`.", param=given)
    if request.readout == "likelihood":
        raise InvalidRequest("The readout `likelihood` goes with `query` and `items`.", param="readout")
    if request.query is None:
        raise InvalidRequest("`query` is missing.", param="query")
    named = request.labels is not None or request.label_token_ids is not None
    return query_prompts(request.query, labels_of(request, model) if named else [], model)


def _likelihoods(request: ScoreRequest, model: Model, query: str | list[int], items: Sequence[str | list[int]]) -> Prepared:
    check_fields(request)
    _check_kinds(query, items)
    partial, refused = bool(request.partial_results), list[Refusal]()
    if partial:
        items, refused = _fitting(query, model, items)
    left_out = {refusal.index for refusal in refused}
    places = [place for place in range(len(items) + len(left_out)) if place not in left_out]
    rows: Iterator[list[int] | None]
    if isinstance(query, list):
        if query:
            _ids(model, query, items)  # checks ids and lengths
        ids, rows = query, (item if isinstance(item, list) else None for item in items)
    else:
        tokenizer, plain = model.texts.tokenizer, request.parse_special_tokens is False
        try:
            body = tokenizer.encode(query, limit=model.facts.context, add_special_tokens=False, parse_special_tokens=not plain)
        except TooManyTokens as error:
            raise model.facts.too_long(error, "query") from None
        begin, end = tokenizer.affixes
        ids = [*begin, *body]
        texts = [item if isinstance(item, str) else "" for item in items]
        # An empty item is refused below; a text in its place keeps its query and item from being an empty prompt.
        rows = own_tokens(ids, _texts(request, model, query, [text or "a" for text in texts]), end)
        rows = ([] if text == "" else row for text, row in zip(texts, rows, strict=True))
    return likelihood_prompts(model, ids, rows, places, refused, partial=partial)


def _fitting(query: str | list[int], model: Model, items: Sequence[str | list[int]]) -> tuple[list[str | list[int]], list[Refusal]]:
    """Return the items whose prompts fit into the context, and the errors of the others. Raises :class:`ContextExceeded` if no item
    fits beside the query."""
    if isinstance(query, list):
        model.facts.check_prompt(len(query), "query")
        room = model.facts.context - len(query)
    else:
        try:
            room = model.facts.context - len(model.texts.tokenizer.encode(query, limit=model.facts.context)) - SEAM_TOKENS
        except TooManyTokens as error:
            raise model.facts.too_long(error, "query") from None
    fitting: list[str | list[int]] = []
    refused = []
    for index, item in enumerate(items):
        long = len(item) > room if isinstance(item, list) else model.texts.tokenizer.shorten(item, max(0, room))[1]
        if long:
            long_item = model.facts.too_long(TooManyTokens(model.facts.context, exact=False), f"items[{index}]")
            refused.append(Refusal(index, long_item.message, long_item.code))
        else:
            fitting.append(item)
    return fitting, refused


def _pairs(request: ScoreRequest, model: Model) -> Prepared:
    """Read pairs of texts: one query with each document, or query and document number by number."""
    given = [name for name in ("query", "items", "labels", "label_token_ids") if getattr(request, name) is not None]
    if given:
        raise InvalidRequest(f"`{given[0]}` does not go with `text_1` and `text_2`, whose labels the preset names.", param=given[0])
    queries, query_param = _one_of(request, "text_1", "queries")
    documents, param = _one_of(request, "text_2", "documents")
    preset = preset_of(model, "rerank")
    if request.item_first and not preset.preset.item_first:
        message = (
            f"The preset {preset.preset.name!r} puts the query before the document; send `query` and `items` with `item_first`."
        )
        raise InvalidRequest(message, param="item_first")
    partial = bool(request.partial_results)
    if len(queries) == 1:
        pairs = Pairs(model, preset, request, param, queries[0], request.instruction, query_param=query_param, partial=partial)
        return pairs.prepared(documents)
    if len(queries) != len(documents):
        message = f"`{query_param}` has {len(queries)} texts and `{param}` has {len(documents)}; give one, or as many."
        raise InvalidRequest(message, param=query_param)
    characters = sum(map(len, (*queries, *documents))) + len(request.instruction or "") * len(queries)
    model.bounds.check("max_request_characters", characters, "characters that must be tokenised", param)
    prompts: list[list[int]] = []
    tokens, truncated, refused = 0, [], []
    for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
        named = f"{query_param}[{index}]"
        pairs = Pairs(model, preset, request, param, query, request.instruction, query_param=named, first=index, partial=partial)
        pair = pairs.prepared([document])
        truncated += [index] if pair.truncated or pair.query_truncated else []
        if pair.refused:
            refused += [msgspec.structs.replace(refusal, index=index) for refusal in pair.refused]
            continue
        prompts.append([*pair.prefix, *pair.rows[0], *pair.suffix])
        tokens += len(prompts[-1])
        model.bounds.check("max_request_tokens", tokens, "tokens or more", param)
    prefix, rows = share_prefix(prompts) if prompts else ([], [])
    return Prepared(rows, prefix, param=f"{param}[]", truncated=truncated, refused=refused)


def _one_of(request: ScoreRequest, *names: str) -> tuple[list[str], str]:
    """Return the texts of the one field that is given, and its name."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"Give one of {' and '.join(f'`{name}`' for name in names)}.", param=names[0])
    value = getattr(request, given[0])
    return ([value] if isinstance(value, str) else value), given[0]


def _texts(request: ScoreRequest, model: Model, query: str, items: Sequence[str | list[int]]) -> PrefixAndBranches:
    texts = [item for item in items if isinstance(item, str)]
    with _too_long(model):
        return tokenise_pairs(
            model.texts.tokenizer,
            query,
            texts,
            limit=model.facts.context,
            bounds=model.bounds,
            parse_special_tokens=request.parse_special_tokens is not False,
        )


def _items_first(request: ScoreRequest, model: Model, query: str | list[int], items: Sequence[str | list[int]]) -> ItemsAndSuffix:
    """Return the beginning of each prompt, and the query behind it. Raises :class:`EmptyPromptError`."""
    if isinstance(query, list):
        lists = _checked_ids(model, query, items)
        model.bounds.check("max_request_tokens", len(query) * len(lists) + sum(map(len, lists)), "tokens", "items")
        if not query and not all(lists):
            raise EmptyPromptError(next(index for index, item in enumerate(lists) if not item))
        return lists, query
    texts = [item for item in items if isinstance(item, str)]
    with _too_long(model):
        return tokenise_items(
            model.texts.tokenizer,
            query,
            texts,
            limit=model.facts.context,
            bounds=model.bounds,
            parse_special_tokens=request.parse_special_tokens is not False,
        )


@contextmanager
def _too_long(model: Model) -> Iterator[None]:
    """Name the item whose prompt is too long."""
    try:
        yield
    except PromptTooLongError as error:
        raise model.facts.too_long(error.tokens, f"items[{error.index}]") from None


def _ids(model: Model, query: list[int], items: Sequence[str | list[int]]) -> PrefixAndBranches:
    """Read token ids. All lengths are checked before anything is joined. Raises :class:`EmptyPromptError`."""
    lists = _checked_ids(model, query, items)
    model.bounds.check("max_request_tokens", len(query) + sum(map(len, lists)), "tokens", "items")
    return join_ids(query, lists)


def _checked_ids(model: Model, query: list[int], items: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the items, which are token ids. Raises :class:`InvalidRequest` for unknown ids and prompts that are too long."""
    lists = [item for item in items if not isinstance(item, str)]
    model.facts.check_ids(query, "query")
    for index, item in enumerate(lists):
        model.facts.check_ids(item, f"items[{index}]")
        model.facts.check_prompt(len(query) + len(item), f"items[{index}]")
    return lists


def _check_kinds(query: str | list[int], items: Sequence[str | list[int]]) -> None:
    """Raise :class:`InvalidRequest` unless query and items are all texts or all lists of token ids."""
    index = next((index for index, item in enumerate(items) if isinstance(item, str) != isinstance(query, str)), None)
    if index is not None:
        kind = "text" if isinstance(query, str) else "token ids"
        raise InvalidRequest(
            f"`items[{index}]` is of another kind than `query`, which is {kind}; give all as text, or all as token ids.",
            param=f"items[{index}]",
        )


def _is_light(request: ScoreRequest) -> bool:
    if request.paired or request.catalogue is not None or isinstance(request.query, str) or request.labels is not None:
        return False
    return request.items is None or len(request.items) <= LIGHT_ITEMS


def _characters(request: ScoreRequest, query_once: bool) -> int:
    if request.paired:
        pairs = (request.text_1, request.text_2, request.queries, request.documents)
        return sum(len(text) for field in pairs for text in ([field] if isinstance(field, str) else field or ()))
    items = [request.items] if isinstance(request.items, str) else request.items or []
    texts = sum(len(item) for item in items if isinstance(item, str)) + sum(map(len, request.labels or ()))
    if not isinstance(request.query, str):
        return texts
    if request.catalogue is not None:
        return texts + len(request.query)
    return texts + len(request.query) * (2 if query_once and may_be_cut(request.query) else len(items))


SCORE = Endpoint(
    kind=ScoreRequest,
    bulk={
        "query": "",
        "items": "",
        "labels": [],
        "label_token_ids": [],
        "text_1": [""],
        "text_2": [""],
        "queries": [""],
        "documents": [""],
        "instruction": "",
        "user": "",
    },
    read=_read,
    is_light=_is_light,
    characters=_characters,
)
