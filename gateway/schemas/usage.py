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
    """Number of tokens of thinking sections, for models that think."""
