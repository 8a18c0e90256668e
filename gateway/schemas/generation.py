"""The common fields of completions and chat completions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine import wire
from gateway.schemas.length_guidance import CustomParams, LengthGuidance
from gateway.schemas.structure import StructuredRequest
from gateway.schemas.truncation import CacheSalt, Priority

MAX_STOPS = 16
MAX_LOGPROBS = 20

StopText = Annotated[str, msgspec.Meta(min_length=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    """Contents of a stream besides text."""

    include_usage: bool | None = False
    """Send one more chunk with the token counts before the end."""
    continuous_usage_stats: bool | None = False
    """Every chunk carries the token counts of its own prompt and completion so far; only with `include_usage`."""


class PromptLogprob(msgspec.Struct, kw_only=True):
    """The log-probability of a token at a position of the prompt, in vLLM's format."""

    logprob: float
    """-9999 represents a probability of zero."""
    rank: int | None
    """Rank of the token at its position, from 1; null for the prompt's own token if it is not among the most probable ones."""
    decoded_token: str


class PromptLookup(msgspec.Struct, forbid_unknown_fields=True):
    """Drafts of the next tokens, from earlier places in prompt and output with the same last tokens."""

    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=wire.MAX_DRAFT_TOKENS)] = 8
    """Most tokens of a draft; 0 for no drafts."""
    ngram: Annotated[int, msgspec.Meta(ge=1, le=wire.MAX_NGRAM)] = 3
    """Number of last tokens that must be the same."""


class TextRequest(StructuredRequest, kw_only=True):
    """Fields of all generating endpoints. Null always means the default."""

    model: str | None = None
    """Name of the model; optional if only one is served."""
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    """Up to 16 texts that end the completion. They are not part of it."""
    stream: bool | None = False
    """Send the completion piece by piece as server-sent events."""
    seed: int | None = None
    """Seed of the draws: equal seed, prompt and settings give equal tokens. The default is a random seed."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    """1, the default, draws from the model's own probabilities; 0 always takes the most probable token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Draw from the most probable tokens whose probabilities sum to this; 1 by default."""
    presence_penalty: Penalty | None = None
    """Makes tokens that have already occurred less probable."""
    frequency_penalty: Penalty | None = None
    """Makes tokens less probable with each time that they have occurred."""
    logit_bias: dict[int, Bias] | None = None
    """Numbers to add to the logits of tokens, by token id."""
    user: str | None = None
    """Accepted for compatibility and not used."""
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    """Draw from this many most probable tokens; 0 or -1 means all."""
    min_p: Fraction | None = None
    """Draw only tokens at least this fraction as probable as the most probable one."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 changes nothing."""
    min_tokens: Count | None = None
    """The completion does not end before this many tokens."""
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=256)] | None = None
    """Token ids that end the completion."""
    ignore_eos: bool | None = False
    """Continue when the model would end the completion."""
    skip_special_tokens: bool | None = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool | None = False
    """Keep the text or token that ended the completion."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    prompt_lookup: PromptLookup | None = None
    """Draft tokens from the text so far, which saves time where the output repeats parts of it. It changes no token. The default
    is the engine's setting."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. The default is true in a raw `prompt` and false in `messages`."""
    length_guidance: LengthGuidance | None = None
    """Guide the length of the text; only with a model that has a length model."""
    custom_params: CustomParams | None = None
    """`length_guidance` with the field names of the length value model's published clients."""


class GenerationRequest(TextRequest, kw_only=True):
    """Fields of completions and chat completions."""

    n: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Completions of each prompt; 1 by default."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token of the prompt, and of this many most probable tokens at its position; not with
    `stream`."""
    return_token_ids: bool | None = False
    """Return the token ids of the prompt and of the completion."""
    return_tokens_as_token_ids: bool | None = False
    """Show tokens in `logprobs` as `token_id:ID`, which tells tokens of the same text apart."""

    @property
    def sequences(self) -> int:
        """``n``, or its default."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries token counts, which vLLM sends only together with the final counts."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, *, max_tokens: int, seed: int) -> wire.Sampling:
        """Return the engine's parameters for these fields."""
        given = {
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens,
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        }
        return wire.Sampling(
            max_tokens=max_tokens,
            seed=seed,
            n=self.sequences,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
