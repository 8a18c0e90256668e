"""Token counts, as every endpoint reports them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What is known about the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that were not computed because their result, or their keys and values, were at hand."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tokens a request took."""

    prompt_tokens: int
    """Tokens of all prompts; for scoring, query and item of every item."""
    total_tokens: int
    """Prompt and completion together."""
    completion_tokens: int | None = None
    """Tokens that were generated, the ending one included."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """Where the prompt's tokens came from."""
