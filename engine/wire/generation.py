"""A generation: the request, and its output in deltas."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.wire.common import Caller
from engine.wire.images import Image
from engine.wire.sampling import LengthGuidance, Sampling, ThinkingLimit

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: an end-of-sequence or stop token was drawn (it is the last of ``tokens``); ``length``: ``max_tokens`` or the context
is reached; ``abort``: the caller asked for it or left."""


class DraftOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Drafts of the next tokens, from earlier places with the same last tokens. They change no token of the output."""

    max_tokens: int
    """Most tokens of a draft, 0 to :data:`MAX_DRAFT_TOKENS`; 0 for no drafts."""
    ngram: int = 3
    """Tokens that must be the same, 1 to :data:`MAX_NGRAM`."""


MAX_DRAFT_TOKENS = 32
MAX_NGRAM = 8


class Generate(msgspec.Struct, tag="generate", frozen=True, omit_defaults=True):
    """Continue ``prompt``."""

    id: str
    prompt: list[int]
    """At least one token."""
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    """None: none. N: the log-probability of each output token and of the N most probable ones (0 to 20). They are the model's own,
    over the full vocabulary at temperature 1, before penalties, bias and filters."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, as for ``logprobs``; sent once, in parts, before the first output."""
    length_guidance: LengthGuidance | None = None
    """Only where ``Info.capabilities`` has ``length_guidance``. Then ``logprobs`` are of the distribution each token was drawn
    from: of its candidates, fewer than N where there are fewer."""
    resume_offset: int = 0
    """Number of tokens at the end of ``prompt`` that an earlier attempt has drawn. ``Delta.offset`` and noise go on from there, and
    these tokens count against ``max_tokens``. Only with ``n`` = 1."""
    grammar: str = ""
    """A grammar of llguidance that the output follows: Lark, which may contain ``%json {...}``, or a grammar as JSON. Empty: none.
    Only where ``Info.capabilities`` has ``grammar``, and not with ``Sampling.ignore_eos``. An end-of-sequence token can be drawn
    only where the output is complete, and must be drawn where nothing else may follow, whatever ``Sampling.min_tokens`` says."""
    thinking_limit: ThinkingLimit | None = None
    """At the limit, only ``thinking.close`` can be drawn, whatever ``sampling`` excludes; with a grammar, at the next place where
    the grammar allows it. The length model does not guide this draw."""
    index: int = 0
    """The sequence index that the noise of the first of the ``n`` sequences is drawn with, so that each can be resumed by itself.
    ``Delta.index`` counts from 0 all the same."""
    tokens_per_delta: int = 1
    """Tokens in each message of a sequence, except its last one; more if one step draws them. A caller that reads nothing before
    the end saves work on both sides.
    """
    prompt_lookup: DraftOptions | None = None
    """None: the engine's setting. Not used with a grammar, a thinking limit or length guidance that has an effect."""
    priority: int = 0
    """See :class:`Score`."""
    deadline: float | None = None
    """Seconds from receipt after which it need not begin."""
    caller: Caller = Caller()
    adapter: str = ""
    """See :class:`Score`."""
    images: list[Image] = []
    """Each image once, however often the prompts name it. Only where ``Info.vision`` is given."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a run of tokens."""

    chosen: list[float | None]
    """[token]; None only for the first token of a prompt, which nothing precedes."""
    top_tokens: list[list[int]]
    """[token][rank], most probable first; empty lists where none were asked for."""
    top: list[list[float]]
    """[token][rank]"""
    values: list[list[float | None]] = []
    """[token][rank], of guided draws: the value of each token of ``top_tokens``, None where the draw was left alone. Empty where
    not asked for."""


class Delta(msgspec.Struct, tag="delta", frozen=True, omit_defaults=True):
    """Output of one sequence of a generation since its last message."""

    id: str
    offset: int
    """Output tokens of this sequence before this message."""
    tokens: list[int]
    index: int = 0
    """Which of the ``n`` sequences."""
    logprobs: Logprobs | None = None
    finish: FinishReason | None = None
    prompt_logprobs: Logprobs | None = None
    """In the first messages of sequence 0, where asked for: of the next :data:`PROMPT_PART` tokens of the prompt, or of the rest.
    All but the last of these messages have no output (:func:`prompt_parts`)."""
    prompt_offset: int = 0
    """Tokens of the prompt before those of ``prompt_logprobs``."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; in the first message of sequence 0 that has output or ends it."""
    queue_seconds: float = 0.0
    """See :class:`Scored`; in the same message as ``cached_tokens``."""
    draft_tokens: int = 0
    """Tokens of drafts that were computed since the last message (:class:`DraftOptions`)."""
    accepted_draft_tokens: int = 0
    """Drafted tokens that were drawn."""


PROMPT_PART = 256
"""Tokens of a prompt whose log-probabilities are in one message: a millisecond of decoding, with twenty for each token."""


def prompt_parts(delta: Delta) -> list[Delta]:
    """Divide the log-probabilities of a long prompt over several messages; ``delta`` with the rest of them is the last. Decoding
    those of a whole prompt takes 100 ms."""
    whole = delta.prompt_logprobs
    if whole is None or len(whole.chosen) <= PROMPT_PART:
        return [delta]
    parts: list[Delta] = []
    for begin in range(0, len(whole.chosen), PROMPT_PART):
        end = begin + PROMPT_PART
        part = Logprobs(whole.chosen[begin:end], whole.top_tokens[begin:end], whole.top[begin:end])
        parts.append(Delta(delta.id, delta.offset, [], delta.index, prompt_logprobs=part, prompt_offset=begin))
    last = parts.pop()
    return [*parts, msgspec.structs.replace(delta, prompt_logprobs=last.prompt_logprobs, prompt_offset=last.prompt_offset)]
