"""Query and items to one prefix and its branches, token for token as if each prompt had been tokenised whole.

A tokeniser may merge across the seam between query and item ("wood" + "en" is one token), so each concatenated prompt goes
through the tokeniser, and what all prompts have in common afterwards is the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from gateway.text.tokenizer import Tokenizer

PrefixAndBranches = tuple[list[int], list[list[int]]]
"""The shared tokens, and for each item the rest of its prompt: at least one token."""


class EmptyPromptError(ValueError):
    """Query and item together are no token at all."""

    def __init__(self, index: int) -> None:
        super().__init__(f"items[{index}]: the query and this item are both empty, so there is no position to score at")
        self.index = index


def tokenise_pairs(tokenizer: Tokenizer, query: str, items: Sequence[str], *, item_first: bool) -> PrefixAndBranches:
    """Tokenise ``query + item`` (``item + query`` with ``item_first``) for each item, special tokens included.

    The prefix is what all prompts share. Where all items are the same text, it stops at the end of the query, so that a later
    request with another item can use it. Slow for long lists: call it in a worker thread. Raises :class:`EmptyPromptError`.
    """
    if not items:
        return [], []
    prompts = tokenizer.encode_batch([item + query if item_first else query + item for item in items])
    if len(set(items)) > 1:
        return _split(prompts, _common_length(prompts))
    shared = tokenizer.encode("" if item_first else query)
    return _split(prompts, _common_length([shared, prompts[0]]))


def join_ids(query: Sequence[int], items: Sequence[Sequence[int]], *, item_first: bool) -> PrefixAndBranches:
    """The same for prompts that come as token ids; nothing is added to them. Raises :class:`EmptyPromptError`."""
    if not items:
        return [], []
    if not item_first and all(items):
        return [*query], [[*item] for item in items]
    if not item_first:
        return _split([[*query, *item] for item in items], len(query))
    distinct = len({tuple(item) for item in items}) > 1
    prompts = [[*item, *query] for item in items]
    return _split(prompts, _common_length(prompts) if distinct else 0)


def share_prefix(prompts: list[list[int]]) -> PrefixAndBranches:
    """The longest prefix that ``prompts``, none of them empty, have in common; of one alone, all but its last token."""
    return _split(prompts, _common_length(prompts))


def _split(prompts: list[list[int]], shared: int) -> PrefixAndBranches:
    """Cut ``prompts`` after their first ``shared`` tokens, or earlier, so that every branch keeps a token."""
    shortest = min(map(len, prompts))
    if shortest == 0:
        raise EmptyPromptError(next(index for index, prompt in enumerate(prompts) if not prompt))
    cut = min(shared, shortest - 1)
    return prompts[0][:cut], [prompt[cut:] for prompt in prompts]


def _common_length(prompts: list[list[int]]) -> int:
    """Tokens that all prompts start with. In the order of lists, the first and the last one have the least in common."""
    pairs = zip(min(prompts), max(prompts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
