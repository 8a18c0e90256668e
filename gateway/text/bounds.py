"""Bounds on one request, and the properties of its model that the checks need."""

from __future__ import annotations

import msgspec

from engine.wire import VisionInfo
from gateway.errors import ContextExceeded, InvalidRequest


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


NEVER_CUT = "Shorten it: a prompt is never cut."


class Facts(msgspec.Struct, frozen=True):
    """Properties of one model."""

    name: str
    """The model name that clients send as ``model``."""
    context: int
    """Largest number of prompt and completion tokens together."""
    vocab_size: int
    """Number of rows of the model's head."""
    max_labels: int
    """Most labels of one score request."""
    vision: VisionInfo | None = None
    """How images are prepared; None for a model that reads text only."""

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise :class:`InvalidRequest` unless all of a prompt's ``ids`` are below the vocabulary size. Decoders refuse negative
        ones."""
        if not ids or max(ids) < self.vocab_size:
            return
        place, id = next((place, id) for place, id in enumerate(ids) if id >= self.vocab_size)
        message = f"`{param}[{place}]`: {id} is not a token of {self.name!r}; ids are 0 to {self.vocab_size - 1}."
        raise InvalidRequest(message, param=f"{param}[{place}]")

    def check_prompt(self, length: int, param: str, *, room: int = 0) -> None:
        """Raise :class:`ContextExceeded` unless a prompt of ``length`` tokens and ``room`` more fit in the context."""
        if length + room > self.context:
            raise self._exceeded(f"{length} tokens long{' and leaves no room for an answer' if room else ''}", param)

    def too_long(self, tokens: TooManyTokens, param: str, *, remedy: str = NEVER_CUT) -> ContextExceeded:
        """Return the error for a prompt that has more tokens than the context holds."""
        return self._exceeded(f"{tokens} long", param, remedy)

    def _exceeded(self, length: str, param: str, remedy: str = NEVER_CUT) -> ContextExceeded:
        message = f"`{param}`: the prompt is {length}; the context of {self.name!r} holds {self.context}."
        return ContextExceeded(f"{message} {remedy}", param=param)
