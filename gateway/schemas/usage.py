"""Token counts in the responses of all endpoints."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that were not computed, because their result or their keys and values were cached."""


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    reasoning_tokens: int
    """Tokens of the thinking section, with its tags."""
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the completion that prompt lookup had drafted; only if there were drafts."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Drafted tokens that are not in the completion. They do not count as completion tokens."""


class ItemUsage(msgspec.Struct, frozen=True):
    """Token counts of each item that has a result, as lists of equal length."""

    index: list[int]
    """Index of the item in the request."""
    prompt_tokens: list[int]
    """Tokens of the item's prompt: query and item."""
    computed_tokens: list[int]
    """Tokens of the item that engines computed for this request: none if its result was reused, or if an equal item came before it.
    Tokens of the query are not among them, because engines compute them once for all items."""
    reused: list[bool]
    """Whether the result was in the cache, or computed for another request at the same time."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    """Tokens of all prompts; for scoring, query and item of every item."""
    total_tokens: int
    """Prompt tokens plus completion tokens."""
    completion_tokens: int | None = None
    """Generated tokens, including the one that ends a completion."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """Number of cached prompt tokens."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """Number of tokens of thinking sections, for models that think, and of drafted tokens."""
