"""Tokenises items and a query behind them, with exactly the tokens of each joined text (:mod:`gateway.text.prompts`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile

from gateway.text.bounds import UNBOUND, Bounds
from gateway.text.prompts import EmptyPromptError, PromptEncoder, encode_whole
from gateway.text.tokenizer import UNBOUNDED, Tokenizer

ItemsAndSuffix = tuple[list[list[int]], list[int]]
"""The beginning of each prompt, which may be empty, and the shared tokens behind it."""


def tokenise_items(
    tokenizer: Tokenizer,
    query: str,
    items: Sequence[str],
    *,
    limit: int = UNBOUNDED,
    bounds: Bounds = UNBOUND,
    param: str = "items",
    parse_special_tokens: bool = True,
) -> ItemsAndSuffix:
    """Tokenise ``item + query`` for each item.

    The suffix has as many tokens of the query as all prompts end with, so the rest of a prompt hardly depends on the query. It is
    empty if the prompts end differently. Arguments and errors are those of :func:`gateway.text.prompts.tokenise_pairs`.
    """
    if not items:
        return [], []
    encoder = PromptEncoder(tokenizer, limit, bounds, param, adds=True, parses=parse_special_tokens)
    for index, item in enumerate(items):
        encoder.check_length(index, len(query) + len(item))
    cut = tokenizer.cut(query, last=False) if len(items) > 1 else None
    prompts = None if cut is None else _query_last(encoder, query[:cut], query[cut:], items)
    if prompts is None:
        prompts = encode_whole(encoder, query, items, item_first=True)
        encoder.count(0, sum(map(len, prompts)), 0)
    empty = next((index for index, prompt in enumerate(prompts) if not prompt), None)
    if empty is not None:
        raise EmptyPromptError(empty)
    shared = common_suffix(prompts, len(encoder.part(0, query)) + len(encoder.end))
    return [prompt[: len(prompt) - shared].tolist() for prompt in prompts], prompts[0][len(prompts[0]) - shared :].tolist()


def _query_last(encoder: PromptEncoder, left: str, right: str, items: Sequence[str]) -> list[array[int]] | None:
    """Tokenise ``right`` once and ``left`` with each item. None if the first prompt differs from its tokens as a whole."""
    rest = [*encoder.part(0, right), *encoder.end]
    prompts = []
    for index, item in enumerate(items):
        prompt = array("I", [*encoder.begin, *encoder.part(index, item + left), *rest])
        encoder.count(index, len(prompt), len(prompt))
        if index == 0 and prompt.tolist() != encoder.whole(0, item + left + right):
            return None
        prompts.append(prompt)
    return prompts


def common_suffix(prompts: Sequence[Sequence[int]], most: int) -> int:
    """Length of the common suffix, or ``most`` if it is longer."""
    first = prompts[0]
    length = min(most, min(map(len, prompts)))
    for prompt in prompts:
        while length and prompt[len(prompt) - length :] != first[len(first) - length :]:
            pairs = zip(reversed(prompt[len(prompt) - length :]), reversed(first[len(first) - length :]), strict=True)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return length
