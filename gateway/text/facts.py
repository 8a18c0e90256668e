"""Properties of a served model that the checks of a request need."""

from __future__ import annotations

import msgspec

from engine.wire import VisionInfo
from gateway.errors import ContextExceeded, InvalidRequest
from gateway.text.bounds import TooManyTokens

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
