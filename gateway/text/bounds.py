"""Bounds on one request: on each prompt, and on all of its prompts together."""

from __future__ import annotations

import msgspec

from gateway.errors import InvalidRequest


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that are checked before anything is copied, tokenised or queued."""

    max_sequences: int = 1024
    """Sequences to generate: prompts times ``n``."""
    max_request_tokens: int = 1 << 20
    """Prompt tokens. A prefix shared by prompts counts once; with ``echo``, prompts count per completion."""
    max_request_characters: int = 16 << 20
    """Characters of query and items, joined, for a model whose tokeniser has no safe cuts in the query."""
    max_scores: int = 1 << 20
    """Items times labels."""
    template_seconds: float = 2.0
    """Time that a model's chat template may take with a request's messages."""
    max_image_pixels: int = 1 << 25
    """Pixels of all images of one request, as the headers of their files give them."""
    max_image_tokens: int = 1 << 14
    """Tokens of all images of one request together; an image that occurs again counts once."""

    def check(self, bound: str, count: int, what: str, param: str) -> None:
        """Raise :class:`InvalidRequest` if ``count`` exceeds the field ``bound``. ``what`` names the counted things."""
        most: int = getattr(self, bound)
        if count > most:
            raise InvalidRequest(
                f"The request has {count} {what}; at most {most} are accepted (the server's `{bound}`)."
                " Send it in several requests.",
                param=param,
            )


UNBOUND = Bounds(2**63 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1)
"""Bounds for callers whose input is trusted."""


class TooManyTokens(ValueError):
    """A text has more tokens than allowed."""

    def __init__(self, count: int, *, exact: bool) -> None:
        """``exact``: the text has exactly ``count`` tokens; otherwise it has more than ``count``."""
        super().__init__(f"{'' if exact else 'more than '}{count} tokens")
        self.count = count
        self.exact = exact
