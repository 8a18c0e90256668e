"""``/v1/score``: query, items and labels to token ids."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.reading.catalogue import NAMING_BYTES, query_prompts
from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.images import plain, reading_content
from gateway.reading.labels import labels_of
from gateway.reading.likelihood import read_likelihoods
from gateway.reading.query_items import check_kinds, fitting_items, item_first_prompts, join_token_ids, tokenise_texts
from gateway.reading.score_pairs import characters_of_pairs, read_pairs
from gateway.schemas.content import PAIRED_DOCUMENTS, PAIRED_QUERIES
from gateway.schemas.score import ScoreRequest
from gateway.schemas.truncation import CUTS
from gateway.text.cuts import may_be_cut
from gateway.text.prepared import Prepared, Refusal
from gateway.text.prompts import EmptyPromptError

ONLY_PAIRED = ("instruction", *CUTS)
"""Fields that only pairs of texts may have."""
WITHOUT_CATALOGUE = ("items", *PAIRED_QUERIES, *PAIRED_DOCUMENTS, "partial_results", "parse_special_tokens")
"""Fields that requests for items of a catalogue must not have, besides :data:`ONLY_PAIRED`."""
LIGHT_ITEMS = 500


def _read(request: ScoreRequest, model: Model) -> Prepared:
    if request.return_token_logprobs and request.readout != "likelihood":
        raise InvalidRequest("`return_token_logprobs` goes with the readout `likelihood`.", param="return_token_logprobs")
    if request.catalogue is not None:
        return _of_catalogue(request, model)
    if request.paired:
        if request.readout == "likelihood":
            raise InvalidRequest("The readout `likelihood` goes with `query` and `items`.", param="readout")
        return read_pairs(request, model)
    if request.query is None or request.items is None:
        missing = "query" if request.query is None else "items"
        raise InvalidRequest(f"`{missing}` is missing; give `query` and `items`, or `text_1` and `text_2`.", param=missing)
    cut = next((name for name in ONLY_PAIRED if getattr(request, name) is not None and getattr(request, name) is not False), None)
    if cut is not None:
        raise InvalidRequest(
            f"`{cut}` goes with `text_1` and `text_2`; a prompt of `query` and `items` is never changed.", param=cut
        )
    query, items = plain(request.query), [*map(plain, [request.items] if isinstance(request.items, str) else request.items)]
    if request.readout == "likelihood":
        return read_likelihoods(request, model, query, items)
    labels = labels_of(request, model)
    model.bounds.check("max_scores", len(items) * len(labels), "scores (items and labels)", "items")
    check_kinds(query, items)
    refused: list[Refusal] = []
    if request.partial_results:
        items, refused = fitting_items(query, model, items)
    prefix: list[int] = []
    suffix: list[int] = []
    try:
        if request.item_first:
            rows, suffix = item_first_prompts(request, model, query, items)
        elif isinstance(query, str):
            prefix, rows = tokenise_texts(request, model, query, items)
        else:
            prefix, rows = join_token_ids(model, query, items)
    except EmptyPromptError as error:
        raise InvalidRequest(f"{error}.", param=f"items[{error.index}]") from None
    tokens = len(prefix) + sum(map(len, rows)) + len(suffix) * len(rows)
    model.bounds.check("max_request_tokens", tokens, "tokens", "items")
    return Prepared(rows, prefix, suffix, labels, param="items[]", refused=refused)


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
    return query_prompts(plain(request.query), labels_of(request, model) if named else [], model)


def _is_light(request: ScoreRequest) -> bool:
    if request.paired or request.catalogue is not None or isinstance(request.query, str) or request.labels is not None:
        return False
    return request.items is None or len(request.items) <= LIGHT_ITEMS


def _characters(request: ScoreRequest, query_once: bool) -> int:
    if request.paired:
        return characters_of_pairs(request)
    items = [request.items] if isinstance(request.items, str) else request.items or []
    texts = sum(len(item) for item in items if isinstance(item, str)) + sum(map(len, request.labels or ()))
    if not isinstance(request.query, str):
        return texts
    if request.catalogue is not None:
        return texts + len(request.query)
    return texts + len(request.query) * (2 if query_once and may_be_cut(request.query) else len(items))


SCORE = reading_content(
    Endpoint(
        kind=ScoreRequest,
        bulk={
            "query": "",
            "items": "",
            "labels": [],
            "label_token_ids": [],
            **{name: [""] for name in (*PAIRED_QUERIES, *PAIRED_DOCUMENTS)},
            "instruction": "",
            "user": "",
        },
        read=_read,
        is_light=_is_light,
        characters=_characters,
        most_fields_bytes=NAMING_BYTES,
    )
)
