"""``/v1/score`` with the readout ``likelihood``: the query's tokens are the prefix, and the item's own tokens are a branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.errors import InvalidRequest
from gateway.reading.endpoint import Model
from gateway.reading.query_items import check_kinds, fitting_items, join_token_ids, tokenise_texts
from gateway.schemas.score import ScoreRequest
from gateway.text.bounds import TooManyTokens
from gateway.text.prepared import Prepared, Refusal
from gateway.text.prompts import PrefixAndBranches

WITHOUT = ("labels", "label_token_ids", "apply_softmax", "item_first")
"""Fields that do not go with likelihoods."""
MAX_ITEM_TOKENS = 1 << 15
"""Most tokens of an item. Its log-probabilities come in one message, which takes the event loop two milliseconds."""


def read_likelihoods(request: ScoreRequest, model: Model, query: str | list[int], items: Sequence[str | list[int]]) -> Prepared:
    """Return the prompts of a request for likelihoods. Raises :class:`InvalidRequest`."""
    _check_fields(request)
    check_kinds(query, items)
    partial, refused = bool(request.partial_results), list[Refusal]()
    if partial:
        items, refused = fitting_items(query, model, items)
    left_out = {refusal.index for refusal in refused}
    places = [place for place in range(len(items) + len(left_out)) if place not in left_out]
    rows: Iterator[list[int] | None]
    if isinstance(query, list):
        if query:
            join_token_ids(model, query, items)  # checks ids and lengths
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
        rows = _own_tokens(ids, tokenise_texts(request, model, query, [text or "a" for text in texts]), end)
        rows = ([] if text == "" else row for text, row in zip(texts, rows, strict=True))
    return _prompts(model, ids, rows, places, refused, partial=partial)


def _check_fields(request: ScoreRequest) -> None:
    """Raise :class:`InvalidRequest` for fields that do not go with likelihoods."""
    given = next((name for name in WITHOUT if getattr(request, name) not in (None, False)), None)
    if given is not None:
        raise InvalidRequest(
            f"`{given}` does not go with the readout `likelihood`, which is of the items' own tokens.", param=given
        )


def _own_tokens(query: list[int], found: PrefixAndBranches, end: Sequence[int]) -> Iterator[list[int] | None]:
    """Yield the tokens of each prompt behind those of the query; None if the prompt does not begin with them.

    ``query``: tokens of the query alone. ``found``: tokens of query and item together. ``end``: special tokens behind each text,
    which are not the item's.
    """
    prefix, branches = found
    shared, more = query[: len(prefix)], query[len(prefix) :]  # what the query has beyond the prefix is in each branch
    begin = prefix[len(query) :]  # what the prefix has beyond the query is of each item
    for branch in branches:
        if prefix[: len(query)] != shared or branch[: len(more)] != more:
            yield None
        else:
            yield [*begin, *branch[len(more) : len(branch) - len(end)]]


def _prompts(
    model: Model,
    query: list[int],
    rows: Iterator[list[int] | None],
    places: Sequence[int],
    refused: list[Refusal],
    *,
    partial: bool,
) -> Prepared:
    """Return the prompts. ``places`` are the indices of the items in the request. Raises :class:`InvalidRequest`; with ``partial``,
    an item without a likelihood is refused alone."""
    if not query:
        message = "`query` is empty; the likelihood of an item needs at least one token before it."
        raise InvalidRequest(message, param="query")
    kept: list[list[int]] = []
    tokens = len(query)
    for place, row in zip(places, rows, strict=True):
        if row and len(row) <= MAX_ITEM_TOKENS:
            kept.append(row)
            tokens += len(row)
            model.bounds.check("max_request_tokens", tokens, "tokens or more", "items")
            continue
        message = _problem(f"items[{place}]", row)
        if not partial:
            raise InvalidRequest(message, param=f"items[{place}]")
        refused.append(Refusal(place, message))
    return Prepared(kept, query, param="items[]", refused=sorted(refused, key=lambda refusal: refusal.index))


def _problem(param: str, row: list[int] | None) -> str:
    if row is None:
        return (
            f"`{param}`: the tokeniser joins the end of `query` and the beginning of this item into one token, so that the item's"
            " own tokens are not defined. Begin the items with the space, instead of ending the query with it, or send token ids."
        )
    if not row:
        return f"`{param}` is empty; there is no token to read."
    return f"`{param}` has {len(row)} tokens; the likelihood of at most {MAX_ITEM_TOKENS} is computed."
