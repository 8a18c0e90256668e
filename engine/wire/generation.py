"""A generation: sampling parameters, grammars, length guidance, the request, and its output in deltas."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from engine.wire.common import Caller, Image

MAX_GRAMMAR_BYTES = 1 << 18
"""Most UTF-8 bytes of ``Generate.grammar``."""
MAX_BAD_TOKENS = 4096
"""Most tokens of all of ``Sampling.bad_words``."""


class GrammarLimits(NamedTuple):
    """Limits of llguidance for every grammar, in the gateway and in engines. A generation that exceeds one of them fails."""

    step_lexer_fuel: int = 100_000
    """Work of the lexer for one token."""
    step_max_items: int = 20_000
    """Items of the parser for one token."""
    max_lexer_states: int = 50_000
    max_grammar_size: int = 250_000
    """Symbols of the grammar."""


class GrammarBounds(NamedTuple):
    """Bounds of compiled grammars. JSONSchemaBench's slowest of 713 schemas took 0.08 s, and its largest 2.7 MiB."""

    seconds: float = 1.0
    """CPU time after which an engine refuses to compile a grammar. A gateway refuses what takes half of it."""
    heap: int = 32 << 20
    """Most memory of one grammar in bytes."""
    kept: int = 1024
    """Most grammars that an engine keeps compiled, and that a gateway's worker remembers as checked."""


GRAMMAR_LIMITS = GrammarLimits()
GRAMMAR_BOUNDS = GrammarBounds()
CONTROL_TOKEN = re.compile(r"<.+>|[<\[{(][|｜].*|.*[|｜][>\]})]", re.DOTALL)
"""Spelling of the added tokens that only a name in a grammar matches, besides those that ``tokenizer.json`` marks as special."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of draws. The engine checks them: values outside these ranges are ``Failed(code="invalid")``."""

    max_tokens: int = 16
    """Output tokens of each sequence, 0 or more; 0 only makes sense with ``prompt_logprobs``."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be drawn before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probabilities sum to at least this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; > 0."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    seed: int = 0
    """Noise depends on (seed, sequence index, output position) alone. The gateway draws one where the client gives none, so that
    a generation can be resumed elsewhere."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence like an end-of-sequence token."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens (``stop_token_ids`` still end it)."""
    n: int = 1
    """Sequences drawn from the one prompt."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens can be drawn; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that cannot be drawn: the last token of each is excluded where the output ends with those before it."""


GuidanceMode = Literal["centered_exp", "value_bias", "mul", "linear", "exp", "length_mul"]
LengthConstraint = Literal["eq", "ge", "le", "eq_soft"]
NEUTRAL_SCALE: dict[GuidanceMode, float] = {
    "centered_exp": 0.0,
    "value_bias": 0.0,
    "mul": 1.0,
    "linear": 1.0,
    "exp": 1.0,
    "length_mul": 1.0,
}
"""The scale of each mode that changes no probability."""
SMALLEST_VALUE = 1e-9
"""Length values are clamped to this and 1 - this where they become numbers of tokens."""


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The thinking section, with which an output may begin."""

    close: int
    """Token that ends it."""
    open: int | None = None
    """Token that begins it, where it is the first of the output; None: the prompt has begun it."""


class ThinkingLimit(msgspec.Struct, frozen=True):
    """Close the thinking section by force."""

    thinking: Thinking
    tokens: int
    """Tokens of the section, without its tags, behind which ``thinking.close`` is drawn; 0 or more."""


class LengthGuidance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings by which a length model steers each draw ("Length Value Model", arXiv 2604.27039).

    The candidates of a draw are what ``top_k`` (or ``Sampling.top_k``, where less), then ``Sampling.top_p``, then
    ``Sampling.min_p`` keep, after penalties, bias and temperature; the most probable one always is one. With v the value of a
    candidate, from 0 (the text ends) to 1 (it never does), ``mode`` tilts their probabilities, or ``constraint`` takes its place.
    Where ``mode`` and ``scale`` change nothing, the draw is that of a request without guidance.
    At temperature 0 the candidates are those of temperature 1. ``eq``, ``ge`` and ``le`` choose one; draws that are left alone take
    the most probable candidate. ``eq_soft`` and scales need a draw and are invalid.
    """

    mode: GuidanceMode = "centered_exp"
    scale: float = 0.0
    """``centered_exp`` and ``value_bias``: below 0 is shorter, above longer. ``mul``, ``length_mul``, ``linear`` and ``exp``:
    below 1 is shorter, above longer."""
    gamma: float | None = None
    """In (0, 1): v = 1 − gamma^(tokens to come). None: the length model's own."""
    constraint: LengthConstraint | None = None
    """Instead of ``mode``. ``eq``: the candidate whose remaining length is nearest to what is left of the target; ``ge``: the
    longest until the target is reached, then the shortest; ``le``: the shortest; ``eq_soft``: the tilt whose mean is the target."""
    target_length: int | None = None
    """Output tokens in all, end-of-sequence not counted, or with ``target_length_mode`` "remaining" from each token on; 0 or more.
    A constraint needs this or ``target_value``."""
    target_length_mode: Literal["total", "remaining"] = "total"
    target_value: float | None = None
    """In [0, 1], instead of ``target_length``."""
    top_k: int = 5
    """Candidates of a draw at most; 1 to ``Limits.max_candidates``."""
    entropy_threshold: float = 0.0
    """Draws whose candidates, renormalised, have less entropy than this, in nats, are left alone."""
    value_min: float = 0.0
    """Draws whose candidates' mean value is below this are left alone; in [0, 1]."""
    return_values: bool = False
    """Send ``Logprobs.values``; needs ``Generate.logprobs``."""
    applies_to: Literal["both", "thinking", "answer"] = "both"
    """Guide only the draws of this section. ``target_length`` counts its tokens alone, and the token that ends the thinking section
    counts as an end there. An output without a thinking section is all answer."""
    thinking: Thinking | None = None
    """Needed where ``applies_to`` names one section."""

    @property
    def neutral(self) -> bool:
        """Whether this changes no probability, whatever the values."""
        if self.constraint is not None:
            return False
        return self.scale == NEUTRAL_SCALE.get(self.mode, 1.0) or (self.mode == "mul" and self.scale <= 0)

    @property
    def needs_draw(self) -> bool:
        """Whether this changes probabilities to draw from. ``eq``, ``ge`` and ``le`` choose a candidate without a draw."""
        return self.constraint not in ("eq", "ge", "le") and not self.neutral


class GrammarVocabulary:
    """The interface that llguidance expects of a tokeniser."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int, encode: Callable[[bytes], list[int]]
    ) -> None:
        """``tokens``: bytes of every token; empty for one that is never allowed. ``special_token_ids``: tokens that only a name
        in a grammar matches. ``encode``: UTF-8 bytes to token ids, without these tokens."""
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


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
