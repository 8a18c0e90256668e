"""``/v1/score`` with pairs of texts, as a preset prescribes."""

from __future__ import annotations

from typing import cast

import msgspec

from gateway.errors import InvalidRequest
from gateway.reading.endpoint import Model
from gateway.reading.images import texts_of
from gateway.reading.pairs import Pairs, preset_of
from gateway.schemas.content import PAIRED_DOCUMENTS, PAIRED_QUERIES, Query
from gateway.schemas.score import ScoreRequest
from gateway.text.prepared import Prepared
from gateway.text.prompts import share_prefix


def read_pairs(request: ScoreRequest, model: Model) -> Prepared:
    """Read pairs of texts: one query with each document, or query and document number by number."""
    others = ("query", "labels", "label_token_ids") if _in_items(request) else ("query", "items", "labels", "label_token_ids")
    given = [name for name in others if getattr(request, name) is not None]
    if given:
        raise InvalidRequest(f"`{given[0]}` does not go with `text_1` and `text_2`, whose labels the preset names.", param=given[0])
    queries, query_param = _one_of(request, *PAIRED_QUERIES)
    documents, param = _one_of(request, *PAIRED_DOCUMENTS, *(("items",) if _in_items(request) else ()))
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


def characters_of_pairs(request: ScoreRequest) -> int:
    """Return the number of characters of all texts."""
    fields = [getattr(request, name) for name in (*PAIRED_QUERIES, *PAIRED_DOCUMENTS)]
    items = [request.items] if isinstance(request.items, str) else request.items or []
    return sum(len(text) for field in (*map(texts_of, fields), items) for text in field if isinstance(text, str))


def _in_items(request: ScoreRequest) -> bool:
    """Whether the documents are in ``items``, as vLLM allows beside ``queries``."""
    return request.queries is not None and request.items is not None


def _one_of(request: ScoreRequest, *names: str) -> tuple[list[str], str]:
    """Return the texts of the one field that is given, and its name."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"Give one of {' and '.join(f'`{name}`' for name in names)}.", param=names[0])
    value = getattr(request, given[0])
    return _items_of(value) if given[0] == "items" else texts_of(value), given[0]


def _items_of(items: str | list[Query]) -> list[str]:
    """Return ``items`` as documents. Raises :class:`InvalidRequest`."""
    if not items:
        raise InvalidRequest("`items` is empty; send at least one text.", param="items")
    for index, item in enumerate([] if isinstance(items, str) else items):
        if not isinstance(item, str):
            message = f"`items[{index}]` is token ids; with `queries`, send texts."
            raise InvalidRequest(message, param=f"items[{index}]")
    return [items] if isinstance(items, str) else cast("list[str]", items)
