"""Bodies of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.generation import MAX_LOGPROBS, Count, GenerationRequest
from gateway.schemas.parameters import Endpoint
from gateway.schemas.usage import Usage

MAX_PROMPTS = 1024


class CompletionRequest(GenerationRequest, kw_only=True):
    """Continue one or several prompts."""

    endpoint: ClassVar[Endpoint] = "completions"
    prompt: str | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1, max_length=1 << 20)]
    """A text, several texts, one list of token ids, or several such lists."""
    max_tokens: Count | None = None
    """Tokens of each completion at most; 16 unless given, and twice a `target_length` more. The context ends it earlier. 0 only
    with `echo`."""
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Must equal `n`: choosing the best of several completions is not supported."""
    echo: bool | None = False
    """Put the prompt before the completion."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token, and of this many most probable ones at its place."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a run of tokens, over the whole vocabulary at temperature 1; with length guidance, over the candidates
    that each token was drawn from. The lists are of one length."""

    tokens: list[str] = []
    """Each token as text; one that is only a part of a character reads like `bytes:\\xe2\\x82`."""
    token_logprobs: list[float | None] = []
    """Null for the first token of a prompt, which nothing precedes. -9999 stands for a probability of zero."""
    top_logprobs: list[dict[str, float] | None] = []
    """The most probable tokens at each place, and the token itself."""
    text_offset: list[int] = []
    """Where each token starts in the text, in characters."""
    top_values: list[dict[str, float] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only with `length_guidance.return_values`: the length model's value after each of the most probable tokens, from 0 (the text
    ends) to 1. Null where the draw was not steered."""
    top_remaining_tokens: list[dict[str, float] | None] | msgspec.UnsetType = msgspec.UNSET
    """And about how many tokens that is, a proxy that lies below the mean."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or one piece of it in a stream."""

    index: int
    """Number of the completion: `n` of the first prompt, then `n` of the second."""
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    """`stop`: the model or a stop text ended it; `length`: `max_tokens` or the context is reached."""


class Completion(msgspec.Struct, kw_only=True):
    """Completions; in a stream, what is new of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Identifies the weights and the settings that change numbers; with a seed, equal requests get equal answers while it is the
    same."""
    choices: list[CompletionChoice]
    usage: Usage | None = None
