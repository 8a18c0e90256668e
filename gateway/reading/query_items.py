"""A query and items, as texts or token ids, to the prompts of the items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from gateway.errors import InvalidRequest
from gateway.reading.endpoint import Model
from gateway.reading.pairs import SEAM_TOKENS
from gateway.schemas.score import ScoreRequest
from gateway.text.bounds import TooManyTokens
from gateway.text.prepared import Refusal
from gateway.text.prompts import (
    EmptyPromptError,
    ItemsAndSuffix,
    PrefixAndBranches,
    PromptTooLongError,
    join_ids,
    tokenise_items,
    tokenise_pairs,
)

T = TypeVar("T")


def check_kinds(query: str | list[int], items: Sequence[str | list[int]]) -> None:
    """Raise :class:`InvalidRequest` unless query and items are all texts or all lists of token ids."""
    index = next((index for index, item in enumerate(items) if isinstance(item, str) != isinstance(query, str)), None)
    if index is not None:
        kind = "text" if isinstance(query, str) else "token ids"
        raise InvalidRequest(
            f"`items[{index}]` is of another kind than `query`, which is {kind}; give all as text, or all as token ids.",
            param=f"items[{index}]",
        )


def tokenise_texts(request: ScoreRequest, model: Model, query: str, items: Sequence[str | list[int]]) -> PrefixAndBranches:
    """Tokenise texts. Raises :class:`EmptyPromptError`, and :class:`InvalidRequest` for prompts that are too long."""
    return _tokenised(tokenise_pairs, request, model, query, items)


def join_token_ids(model: Model, query: list[int], items: Sequence[str | list[int]]) -> PrefixAndBranches:
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


def item_first_prompts(
    request: ScoreRequest, model: Model, query: str | list[int], items: Sequence[str | list[int]]
) -> ItemsAndSuffix:
    """Return the beginning of each prompt, and the query behind it. Raises :class:`EmptyPromptError`."""
    if isinstance(query, list):
        lists = _checked_ids(model, query, items)
        model.bounds.check("max_request_tokens", len(query) * len(lists) + sum(map(len, lists)), "tokens", "items")
        if not query and not all(lists):
            raise EmptyPromptError(next(index for index, item in enumerate(lists) if not item))
        return lists, query
    return _tokenised(tokenise_items, request, model, query, items)


def fitting_items(
    query: str | list[int], model: Model, items: Sequence[str | list[int]]
) -> tuple[list[str | list[int]], list[Refusal]]:
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


def _tokenised(tokenise: Callable[..., T], request: ScoreRequest, model: Model, query: str, items: Sequence[str | list[int]]) -> T:
    """Tokenise texts within the bounds of the model and of the server."""
    texts = [item for item in items if isinstance(item, str)]
    with _too_long(model):
        return tokenise(
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
