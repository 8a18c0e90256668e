"""Bodies of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.generation import MAX_LOGPROBS, Count, GenerationRequest, PromptLogprob
from gateway.schemas.parameters import EndpointName, TokenId
from gateway.schemas.usage import Usage

MAX_PROMPTS = 1024


class CompletionRequest(GenerationRequest, kw_only=True):
    """Continue one or several prompts."""

    endpoint: ClassVar[EndpointName] = "completions"
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1, max_length=1 << 20)]
    """A text, several texts, one list of token ids, or several such lists."""
    max_tokens: Count | None = None
    """Most tokens of each completion; the default is 16, plus twice a `target_length`. The context may end it earlier. 0 is allowed
    only with `echo`."""
    best_of: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Draw this many completions of each prompt and return the `n` whose tokens have the highest mean log-probability; not with
    `stream`. All count as completion tokens. By default `n`."""
    add_special_tokens: bool | None = True
    """Add the special tokens, such as BOS, that the tokeniser adds to a text."""
    echo: bool | None = False
    """Put the prompt before the completion."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token, and of this many most probable tokens at its position."""

    @property
    def completions(self) -> int:
        """``n``, or its default."""
        return super().sequences

    @property
    def sequences(self) -> int:
        """Completions of each prompt to draw."""
        return max(self.completions, self.best_of or 1)

    @property
    def is_choosy(self) -> bool:
        """Whether more completions are drawn than returned."""
        return self.sequences > self.completions


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of consecutive tokens, over the whole vocabulary at temperature 1; with length guidance, over the
    candidates of each draw. All lists have the same length."""

    tokens: list[str] = []
    """Each token as text; a token that is only part of a character reads like `bytes:\\xe2\\x82`."""
    token_logprobs: list[float | None] = []
    """Null for the first token of a prompt, which has no predecessor. -9999 represents a probability of zero."""
    top_logprobs: list[dict[str, float] | None] = []
    """The most probable tokens at each position, and the token itself."""
    text_offset: list[int] = []
    """Start of each token in the text, in characters."""
    top_values: list[dict[str, float] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only with `length_guidance.return_values`: the length model's value after each of the most probable tokens, from 0 (the text
    ends) to 1. Null if the token was drawn without guidance."""
    top_remaining_tokens: list[dict[str, float] | None] | msgspec.UnsetType = msgspec.UNSET
    """These values in tokens, approximately: a proxy that lies below the mean."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or one piece of it in a stream."""

    index: int
    """Number of the completion: the `n` completions of the first prompt come first, then those of the second."""
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    """`stop`: the model or a stop text ended the completion; `length`: `max_tokens` or the context was reached."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the completion's tokens; only with `return_token_ids`."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the prompt's tokens, in the first completion of each prompt; only with `return_token_ids`."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only with `prompt_logprobs`, in the first completion of each prompt: for each token of the prompt, the log-probabilities of
    the token and of the most probable ones at its position, by token id. Null for the first token."""


class Completion(msgspec.Struct, kw_only=True):
    """Completions; in a stream, their new output."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Identifies the weights and the settings that affect numbers. While it stays the same, equal requests with a seed get equal
    answers."""
    choices: list[CompletionChoice]
    usage: Usage | None = None
