"""Tokenises queries and items to prefixes and branches, with exactly the tokens of each joined text.

A tokeniser may merge across the seam between query and item ("wood" + "en" is one token). Therefore the query is divided at a safe
cut (``cuts.py``): the part far from the items is tokenised once, and the part next to them together with each item. If the
tokeniser has no safe cuts, each joined text is tokenised whole, and the sum of their lengths is bounded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from yardstick_llm.gateway.text.prepared import UNBOUND, Bounds, TooManyTokens
from yardstick_llm.gateway.text.tokenizer import UNBOUNDED, Tokenizer

PrefixAndBranches = tuple[list[int], list[list[int]]]
"""The shared tokens, and the rest of each item's prompt: at least one token."""

Ids = TypeVar("Ids", list[int], "array[int]")


class EmptyPromptError(ValueError):
    """Query and item together have no token."""

    def __init__(self, index: int) -> None:
        super().__init__(f"items[{index}]: the query and this item are both empty, so there is no position to score at")
        self.index = index


class PromptTooLongError(ValueError):
    """The prompt of an item has more tokens than allowed."""

    def __init__(self, index: int, tokens: TooManyTokens) -> None:
        super().__init__(str(tokens))
        self.index = index
        self.tokens = tokens


def tokenise_pairs(
    tokenizer: Tokenizer,
    query: str,
    items: Sequence[str],
    *,
    limit: int = UNBOUNDED,
    bounds: Bounds = UNBOUND,
    param: str = "items",
    add_special_tokens: bool = True,
    parse_special_tokens: bool = True,
) -> PrefixAndBranches:
    """Tokenise ``query + item`` for each item.

    The prefix is the part that all prompts share. If all items are equal, it stops at the end of the query, so that a later
    request with another item can use it. No prompt may have more than ``limit`` tokens. ``param`` is the field of the request that
    holds the items.

    Raises :class:`EmptyPromptError`, :class:`PromptTooLongError`, and :class:`InvalidRequest` for more than ``bounds``.
    """
    if not items:
        return [], []
    encoder = PromptEncoder(tokenizer, limit, bounds, param, add_special_tokens, parse_special_tokens)
    cut = tokenizer.cut(query, last=True) if len(items) > 1 else None
    found = None if cut is None else _query_first(encoder, query[:cut], query[cut:], items)
    if found is not None:
        return found
    prompts = encode_whole(encoder, query, items, item_first=False)
    alone = prompts if len(set(items)) > 1 else [array("I", encoder.encode(0, query, whole=True)), prompts[0]]
    prefix, branches = split(prompts, common_length(alone))
    encoder.count(0, len(prefix) + sum(map(len, branches)), 0)
    return prefix.tolist(), [branch.tolist() for branch in branches]


@dataclass(slots=True)
class PromptEncoder:
    """Encodes the prompts of one request, counts their tokens, and reports the prompt that is too long."""

    tokenizer: Tokenizer
    limit: int
    bounds: Bounds
    param: str
    adds: bool
    parses: bool
    tokens: int = 0

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """Special tokens before and after each prompt."""
        return self.tokenizer.affixes if self.adds else ([], [])

    def encode(self, index: int, text: str, *, whole: bool = False) -> list[int]:
        """Return the tokens of a part of a prompt, or of a ``whole`` one. Raises :class:`PromptTooLongError`."""
        adds = whole and self.adds
        try:
            return self.tokenizer.encode(text, limit=self.limit, add_special_tokens=adds, parse_special_tokens=self.parses)
        except TooManyTokens as error:
            raise PromptTooLongError(index, error) from None

    def count(self, index: int, tokens: int, length: int) -> None:
        """Count a prompt of ``length`` tokens, of which ``tokens`` are not shared. Raises :class:`PromptTooLongError`."""
        if length > self.limit:
            raise PromptTooLongError(index, TooManyTokens(length, exact=True))
        self.tokens += tokens
        self.bounds.check("max_request_tokens", self.tokens, "tokens or more", self.param)


def _query_first(encoder: PromptEncoder, left: str, right: str, items: Sequence[str]) -> PrefixAndBranches | None:
    """Tokenise ``left`` once and ``right`` with each item. None if the first prompt differs from its tokens as a whole."""
    prefix = [*encoder.affixes[0], *encoder.encode(0, left)]
    encoder.count(0, len(prefix), len(prefix))
    rests = []
    for index, item in enumerate(items):
        rest = [*encoder.encode(index, right + item), *encoder.affixes[1]]
        encoder.count(index, len(rest), len(prefix) + len(rest))
        if index == 0 and [*prefix, *rest] != encoder.encode(0, left + right + item, whole=True):
            return None
        rests.append(rest)
    others = rests if len(set(items)) > 1 else [[*encoder.encode(0, right), *encoder.affixes[1]], rests[0]]
    shared, branches = split(rests, common_length(others))
    return prefix + shared, branches


def encode_whole(encoder: PromptEncoder, query: str, items: Sequence[str], *, item_first: bool) -> list[array[int]]:
    """Tokenise every prompt whole."""
    if len(items) > 1:
        characters = len(query) * len(items) + sum(map(len, items))
        encoder.bounds.check("max_request_characters", characters, "characters that must be tokenised", encoder.param)
    prompts = []
    for index, item in enumerate(items):
        prompts.append(array("I", encoder.encode(index, item + query if item_first else query + item, whole=True)))
        encoder.count(index, 0, len(prompts[-1]))
    return prompts


def join_ids(query: Sequence[int], items: Sequence[Sequence[int]]) -> PrefixAndBranches:
    """Build prefix and branches of prompts given as token ids; no token is added. Raises :class:`EmptyPromptError`."""
    if not items:
        return [], []
    if all(items):
        return [*query], [[*item] for item in items]
    if not query:
        raise EmptyPromptError(next(index for index, item in enumerate(items) if not item))
    return [*query[:-1]], [[query[-1], *item] for item in items]


def share_prefix(prompts: list[list[int]]) -> PrefixAndBranches:
    """Split off the longest common prefix of ``prompts``, none of them empty; for a single one, all but its last token."""
    return split(prompts, common_length(prompts))


def split(prompts: list[Ids], shared: int) -> tuple[Ids, list[Ids]]:
    """Cut ``prompts`` after their first ``shared`` tokens, or earlier, so that every branch keeps a token."""
    shortest = min(map(len, prompts))
    if shortest == 0:
        raise EmptyPromptError(next(index for index, prompt in enumerate(prompts) if not prompt))
    cut = min(shared, shortest - 1)
    return prompts[0][:cut], [prompt[cut:] for prompt in prompts]


def common_length(prompts: Sequence[Ids]) -> int:
    """Length of the common prefix. In lexicographic order, the first and the last prompt have the shortest one."""
    pairs = zip(min(prompts), max(prompts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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
    encoder = PromptEncoder(tokenizer, limit, bounds, param, True, parse_special_tokens)
    cut = tokenizer.cut(query, last=False) if len(items) > 1 else None
    prompts = None if cut is None else _query_last(encoder, query[:cut], query[cut:], items)
    if prompts is None:
        prompts = encode_whole(encoder, query, items, item_first=True)
        encoder.count(0, sum(map(len, prompts)), 0)
    empty = next((index for index, prompt in enumerate(prompts) if not prompt), None)
    if empty is not None:
        raise EmptyPromptError(empty)
    shared = common_suffix(prompts, len(encoder.encode(0, query)) + len(encoder.affixes[1]))
    return [prompt[: len(prompt) - shared].tolist() for prompt in prompts], prompts[0][len(prompts[0]) - shared :].tolist()


def _query_last(encoder: PromptEncoder, left: str, right: str, items: Sequence[str]) -> list[array[int]] | None:
    """Tokenise ``right`` once and ``left`` with each item. None if the first prompt differs from its tokens as a whole."""
    rest = [*encoder.encode(0, right), *encoder.affixes[1]]
    prompts = []
    for index, item in enumerate(items):
        prompt = array("I", [*encoder.affixes[0], *encoder.encode(index, item + left), *rest])
        encoder.count(index, len(prompt), len(prompt))
        if index == 0 and prompt.tolist() != encoder.encode(0, item + left + right, whole=True):
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
