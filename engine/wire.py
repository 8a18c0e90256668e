"""The contract between gateway and engine: tagged msgspec structs, msgpack over HTTP. No torch, no text.

HTTP face of an engine pod (every body is msgpack unless said otherwise):

==========================  ==============================================================================
``POST /score``             one :class:`Score` or :class:`ScoreItems` in, one :class:`Scored` or :class:`Failed` out
``POST /generate``          one :class:`Generate` in, a stream of frames out: :class:`Delta` ..., or :class:`Failed`
``POST /abort``             one :class:`Abort` in, 204 out; unknown ids are no error
``GET /info``               :class:`Info`
``GET /stats``              :class:`Stats`
``GET /tokenizer``          :class:`TokenizerFiles`
``GET /adapters``           :class:`Adapters`; its revision is in :data:`ADAPTERS_HEADER`
``POST /adapters/load``     one :class:`LoadAdapter` in, one :class:`Adapter` or :class:`Failed` out
``POST /adapters/unload``   one :class:`UnloadAdapter` in, 204 or :class:`Failed` out
``GET /livez`` ``/readyz``  200 or 503, plain text; ``/readyz`` has :data:`MODEL_HEADER` and :data:`ADAPTERS_HEADER`
``GET /metrics``            Prometheus text
==========================  ==============================================================================

A frame is a 4-byte little-endian length and that many bytes of msgpack (:func:`pack_frame`, :class:`FrameReader`).
The body of a failed call is a :class:`Failed` under the HTTP status that :data:`STATUS_OF_CODE` gives its code.
Closing the connection of ``/score`` or ``/generate`` aborts the request. Their headers ``traceparent`` and
``tracestate`` are the context of the caller's trace (https://www.w3.org/TR/trace-context/). An engine that was given tokens asks
every path but the last two rows for ``Authorization: Bearer TOKEN``.

Every accepted request ends with exactly one terminal message: ``Scored``, ``Failed``, or for a generation one ``Delta`` with
``finish`` set for each of its ``n`` sequences.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

MODEL_HEADER = "x-yardstick-model"
"""The name of the model, percent-encoded; sent while it is loading as well."""
ADAPTERS_HEADER = "x-yardstick-adapters"
"""Revision of the answer of ``GET /adapters``, in ASCII. Another list and another process have another revision."""
TASK_TOKEN = "<|task:{}|>"  # noqa: S105 - the form of a token
"""Spelling of the token of a task. It stands for the tokeniser's own token at the beginning of a text, and an engine computes that
text with what the task adds to the model's weights."""
ErrorCode = Literal[
    "invalid",
    "unauthorized",
    "unknown_adapter",
    "overloaded",
    "not_ready",
    "deadline",
    "aborted",
    "out_of_memory",
    "not_a_number",
    "internal",
]
"""``unknown_adapter``: the engine has no adapter of this digest or name; another replica may. ``not_a_number``: the model's numbers
overflow, so no token can be drawn."""
STATUS_OF_CODE: dict[str, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "unknown_adapter": 404,
    "overloaded": 429,
    "not_ready": 503,
    "deadline": 504,
    "aborted": 499,
    "out_of_memory": 503,
    "not_a_number": 500,
    "internal": 500,
}


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client on whose behalf a request runs."""

    request_id: str = ""
    """The `x-request-id` of the client's request; the engine's log names it."""
    tenant: str = ""
    """The flow of the engine's fair queue: an opaque id of the API key, never a secret. Empty: the gateway asks for no keys."""
    weight: float = 1.0
    """Share of the engine relative to other tenants; 0.001 to 1000."""
    cache_salt: str = ""
    """Namespace in the prefix cache: only requests with an equal salt share cached tokens."""
    keep_prefix: bool = True
    """False: the prefix cache shares nothing with this request and keeps nothing of it after its end."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request. It still gets its terminal message."""

    id: str


class Failed(msgspec.Struct, tag="failed", frozen=True, omit_defaults=True):
    """The request ended without a result."""

    id: str
    code: ErrorCode
    message: str
    """The problem and its remedy, for a person; no paths, no tracebacks."""
    retryable: bool = False
    """True where the same request may succeed on another replica, or here later."""
    retry_after: float | None = None
    """Seconds."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit integers, the least significant byte first."""
    if isinstance(ids, array) and ids.typecode == "I" and sys.byteorder == "little":
        return ids.tobytes()
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


IMAGE_TOKENS = 1 << 30
"""Token id ``IMAGE_TOKENS + i`` in a prompt stands for one merged patch of ``images[i]`` of the same message. An image's tokens
stand together, :meth:`VisionInfo.tokens_of` of them. They are not ids of the vocabulary: no output and no label may have them."""
MAX_IMAGES = 256
"""Most images of one message."""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image that was resized to whole merged patches. Its normalisation is the engine's."""

    digest: bytes
    """:func:`image_digest` of the other fields. The engine computes it again before it trusts it."""
    rows: int
    """Height in patches; a multiple of :attr:`VisionInfo.merge_size`."""
    columns: int
    """Width in patches; a multiple of :attr:`VisionInfo.merge_size`."""
    pixels: bytes
    """[rows · columns, 3, patch_size, patch_size] uint8, RGB. Patches of one merged patch follow each other, in the order of
    Hugging Face's processor: [rows / m, columns / m, m, m] with m = merge_size."""


class VisionInfo(msgspec.Struct, frozen=True):
    """Constants with which a gateway prepares images for a model, those of its ``preprocessor_config.json`` and ``config.json``."""

    patch_size: int
    """Height and width of a patch, in pixels."""
    merge_size: int
    """Height and width of a merged patch, in patches. A merged patch is one token."""
    min_pixels: int
    """Smaller images are enlarged."""
    max_pixels: int
    """Larger images are reduced."""
    image_token: int
    """Id of the token that marks one merged patch in a rendered chat template (``<|image_pad|>``). The gateway replaces one such
    token by the tokens of the image."""
    max_images: int = MAX_IMAGES
    """Most images of one message."""
    max_tokens: int = 0
    """Most image tokens of one message, counted once for each image."""

    def tokens_of(self, image: Image) -> int:
        """Return the number of tokens of ``image``."""
        return image.rows * image.columns // self.merge_size**2


def image_digest(rows: int, columns: int, pixels: bytes) -> bytes:
    """Return 16 bytes of BLAKE2b over ``rows`` and ``columns``, each as 4 bytes, the least significant first, and ``pixels``."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))
    digest.update(pixels)
    return digest.digest()


ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Names of adapters. They have no colon, which separates base and adapter in ``base:adapter`` for clients."""


class Adapter(msgspec.Struct, tag="adapter", frozen=True, omit_defaults=True):
    """An adapter that requests may name."""

    name: str
    """See :data:`ADAPTER_NAME`; not the name of the base model."""
    digest: str
    """Digest of weights and configuration, hexadecimal: what :attr:`engine.wire.Score.adapter` names."""
    rank: int
    """Largest rank of its matrices."""
    bytes: int
    """Host memory that it takes."""
    capabilities: list[str]
    """Capabilities for requests with this adapter; see :attr:`engine.wire.Info.capabilities`."""
    classes: list[str] = []
    """Classes for requests with this adapter; see :attr:`engine.wire.Info.classes`."""
    multi_label: bool = False
    """For requests with this adapter; see :attr:`engine.wire.Info.multi_label`."""
    regression: bool = False
    """For requests with this adapter; see :attr:`engine.wire.Info.regression`."""


class Adapters(msgspec.Struct, tag="adapters", frozen=True, omit_defaults=True):
    """The adapters of an engine, by name."""

    adapters: list[Adapter]
    max_adapters: int = 0
    """Most adapters in host memory; 0: the engine takes none."""
    max_rank: int = 0
    problem: str = ""
    """Why it takes none, as a clause."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, omit_defaults=True):
    """Load an adapter in PEFT's format. Loading equal files under the same name again changes nothing."""

    name: str
    path: str
    """A directory on the engine's machine, or a hub id."""
    replace: bool = False
    """Replace an adapter of this name that has another digest; without this, that is an error."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Unload an adapter. Requests in progress finish with its weights."""

    name: str


MOST_FLOAT = sys.float_info.max
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


Count = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 30)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Finite = Annotated[float, Meta(ge=-MOST_FLOAT, le=MOST_FLOAT)]
"""Neither infinite nor not-a-number."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of draws. An engine refuses messages with other values when it decodes them."""

    max_tokens: Tokens = 16
    """Output tokens of each sequence, 0 or more; 0 only makes sense with ``prompt_logprobs``."""
    min_tokens: Tokens = 0
    """End-of-sequence and stop tokens cannot be drawn before this many output tokens."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_k: Tokens = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the smallest set of most probable tokens whose probabilities sum to at least this; in (0, 1]."""
    min_p: Share = 0.0
    """Keep tokens at least this fraction as probable as the most probable one; in [0, 1]."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of every token already in the output; in [-2, 2]."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once for each time it is in the output; in [-2, 2]."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; > 0."""
    logit_bias: dict[int, Finite] = {}
    """Added to the logits of these token ids."""
    seed: Count = 0
    """Noise depends on (seed, sequence index, output position) alone. The gateway draws one where the client gives none, so that
    a generation can be resumed elsewhere."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence like an end-of-sequence token."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens (``stop_token_ids`` still end it)."""
    n: Annotated[int, Meta(ge=1)] = 1
    """Sequences drawn from the one prompt."""
    allowed_token_ids: Annotated[tuple[int, ...], Meta(min_length=1)] | None = None
    """Only these tokens can be drawn; None: all."""
    bad_words: tuple[Annotated[tuple[int, ...], Meta(min_length=1)], ...] = ()
    """Sequences of tokens that cannot be drawn: the last token of each is excluded where the output ends with those before it."""


GuidanceMode = Literal["centered_exp", "value_bias", "mul", "linear", "exp", "length_mul"]
LengthConstraint = Literal["eq", "ge", "le", "within", "about", "eq_soft"]
WINDOW = 0.1
"""Share of a target that a length may be away from it, for the constraint ``about``."""
LengthUnit = Literal["tokens", "words", "sentences", "characters"]
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
    tokens: Count
    """Tokens of the section, without its tags, behind which ``thinking.close`` is drawn; 0 or more."""


class LengthGuidance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings by which a length model steers each draw ("Length Value Model", arXiv 2604.27039).

    The candidates of a draw are what ``top_k`` (or ``Sampling.top_k``, where less), then ``Sampling.top_p``, then
    ``Sampling.min_p`` keep, after penalties, bias and temperature; the most probable one always is one. With v the value of a
    candidate, from 0 (the text ends) to 1 (it never does), ``mode`` tilts their probabilities, or ``constraint`` takes its place.
    Where ``mode`` and ``scale`` change nothing, the draw is that of a request without guidance.
    ``eq``, ``ge``, ``le``, ``within`` and ``about`` exclude candidates, and these are those of temperature 1 at every temperature;
    a draw among several that are left has the request's own. At temperature 0 it is the most probable one; scales and ``eq_soft``
    need a draw and are invalid.
    """

    mode: GuidanceMode = "centered_exp"
    scale: Finite = 0.0
    """``centered_exp`` and ``value_bias``: below 0 is shorter, above longer. ``mul``, ``length_mul``, ``linear`` and ``exp``:
    below 1 is shorter, above longer."""
    gamma: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """In (0, 1): v = 1 − gamma^(tokens to come). None: the length model's own."""
    constraint: LengthConstraint | None = None
    """Instead of ``mode``. ``eq``: the candidate whose remaining length is nearest to what is left of the target; ``ge``: the
    longest until the target is reached, then the shortest; ``le``: the shortest; ``within``: those that are not longer
    than the target, or the shortest; ``about``: each by its probability times that of a text whose length is within
    :data:`WINDOW` of ``target_length``, which then is of the whole output or section; ``eq_soft``: the tilt whose mean is the
    target."""
    confidence: Annotated[float, Meta(ge=0.5, lt=1)] | None = None
    """With ``within`` and ``target_length``: the real remaining length behind a candidate is within the target with this
    probability, by ``Info.lenvm_calibration``. From 0.5 to below 1. None: the predicted length is within it."""
    target_length: Count | None = None
    """Output tokens in all, end-of-sequence not counted, or with ``target_length_mode`` "remaining" from each token on; 0 or more.
    A constraint needs this or ``target_value``."""
    unit: LengthUnit = "tokens"
    """Unit of ``target_length``; see :mod:`engine.requests.units`. Others than tokens only in all, of the whole output, and where
    ``Info.capabilities`` has ``grammar``, because they need the spelling of tokens."""
    target_length_mode: Literal["total", "remaining"] = "total"
    target_value: Share | None = None
    """In [0, 1], instead of ``target_length``."""
    top_k: Annotated[int, Meta(ge=1)] = 5
    """Candidates of a draw at most; 1 to ``Limits.max_candidates``."""
    entropy_threshold: Annotated[float, Meta(ge=0, le=MOST_FLOAT)] = 0.0
    """Draws whose candidates, renormalised, have less entropy than this, in nats, are left alone."""
    value_min: Share = 0.0
    """Draws whose candidates' mean value is below this are left alone; in [0, 1]."""
    return_values: bool = False
    """Send ``Logprobs.values``; needs ``Generate.logprobs``."""
    applies_to: Literal["both", "thinking", "answer"] = "both"
    """Guide only the draws of this section. ``target_length`` counts its tokens alone, and the token that ends the thinking section
    counts as an end there. An output without a thinking section is all answer."""
    thinking: Thinking | None = None
    """Needed where ``applies_to`` names one section."""
    end_min_p: Share | None = None
    """The most probable token that ends the section is a candidate, also beyond ``top_k`` and the filters, if it has at least this
    share of the largest probability. It takes the place of the last of ``top_k``, unless that is 1. None: as any other token."""

    @property
    def neutral(self) -> bool:
        """Whether this changes no probability, whatever the values."""
        if self.constraint is not None:
            return False
        return self.scale == NEUTRAL_SCALE.get(self.mode, 1.0) or (self.mode == "mul" and self.scale <= 0)

    @property
    def needs_draw(self) -> bool:
        """Whether this changes probabilities to draw from. Constraints that exclude candidates need no draw."""
        return not self.chooses and not self.neutral

    @property
    def chooses(self) -> bool:
        """Whether the constraint excludes candidates, which it does at every temperature."""
        return self.constraint in ("eq", "ge", "le", "within", "about")


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


MAX_DRAFT_TOKENS = 32
MAX_NGRAM = 8


class DraftOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Drafts of the next tokens, from earlier places with the same last tokens. They change no token of the output."""

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
    """Most tokens of a draft, 0 to :data:`MAX_DRAFT_TOKENS`; 0 for no drafts."""
    ngram: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = 3
    """Tokens that must be the same, 1 to :data:`MAX_NGRAM`."""


class Generate(msgspec.Struct, tag="generate", frozen=True, omit_defaults=True):
    """Continue ``prompt``."""

    id: str
    prompt: Annotated[list[int], Meta(min_length=1)]
    """At least one token."""
    sampling: Sampling = Sampling()
    logprobs: Count | None = None
    """None: none. N: the log-probability of each output token and of the N most probable ones (0 to 20). They are the model's own,
    over the full vocabulary at temperature 1, before penalties, bias and filters."""
    prompt_logprobs: Count | None = None
    """Log-probabilities of the prompt's tokens, as for ``logprobs``; sent once, in parts, before the first output."""
    length_guidance: LengthGuidance | None = None
    """Only where ``Info.capabilities`` has ``length_guidance``. Then ``logprobs`` are of the distribution each token was drawn
    from: of its candidates, fewer than N where there are fewer."""
    resume_offset: Count = 0
    """Number of tokens at the end of ``prompt`` that an earlier attempt has drawn. ``Delta.offset`` and noise go on from there, and
    these tokens count against ``max_tokens``. Only with ``n`` = 1."""
    grammar: str = ""
    """A grammar of llguidance that the output follows: Lark, which may contain ``%json {...}``, or a grammar as JSON. Empty: none.
    Only where ``Info.capabilities`` has ``grammar``, and not with ``Sampling.ignore_eos``. An end-of-sequence token can be drawn
    only where the output is complete, and must be drawn where nothing else may follow, whatever ``Sampling.min_tokens`` says."""
    thinking_limit: ThinkingLimit | None = None
    """At the limit, only ``thinking.close`` can be drawn, whatever ``sampling`` excludes; with a grammar, at the next place where
    the grammar allows it. The length model does not guide this draw."""
    index: Count = 0
    """The sequence index that the noise of the first of the ``n`` sequences is drawn with, so that each can be resumed by itself.
    ``Delta.index`` counts from 0 all the same."""
    tokens_per_delta: Annotated[int, Meta(ge=1)] = 1
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
    expected_tokens: float = 0.0
    """Output tokens that the length model expected of each sequence, the end of sequence included, before the first was drawn; in
    the same message. 0 without a forecast."""
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


class Limits(msgspec.Struct, frozen=True):
    """Limits of one request."""

    max_branches: int
    """Branches of one :class:`Score`."""
    max_slots: int
    """Prefix + its longest branch, in tokens; also prompt + max_tokens."""
    max_logprobs: int
    max_labels: int
    max_sequences: int
    """``n``."""
    max_candidates: int = 64
    """``LengthGuidance.top_k``."""


class AttentionChoice(msgspec.Struct, frozen=True):
    """The attention backend of an engine."""

    backend: str
    """``reference``, ``triton`` or ``flashinfer``."""
    reason: str
    """Why it was chosen, as a clause."""
    fallback: bool = False
    """Whether ``auto`` chose it because the fastest backend of the device cannot be used."""
    modules: str = ""
    """Origin of FlashInfer's modules: ``prebuilt``, or ``compiled`` on this machine. Empty for other backends."""


class Calibration(msgspec.Struct, frozen=True):
    """How real remaining lengths differ from those that a length model predicts, measured on answers that it was not trained on."""

    edges: list[float]
    """Bounds between bins of the value, ascending."""
    log_ratio: dict[str, list[float]]
    """Quantiles of ln(real / predicted) in each bin, by their level, such as "0.05" and "0.95"."""
    states: int
    """States that they were measured on."""


class Info(msgspec.Struct, tag="info", frozen=True):
    """Description of a served model. Constant for the life of the pod."""

    model: str
    """The name clients ask for."""
    fingerprint: str
    """Digest of weights, dtype and the settings that change numbers; part of every cache key."""
    vocab_size: int
    """Rows of the head; the tokeniser's vocabulary may be smaller (padding)."""
    max_context: int
    """Prompt and output tokens together."""
    eos_token_ids: list[int]
    capabilities: list[str]
    """``score`` (:class:`Labels` and :class:`Likelihood`), ``generate``, ``classify`` (:class:`Classes`), ``embed``
    (:class:`Embedding`), ``token_vectors`` (:class:`TokenVectors`), ``sparse`` (:class:`Sparse`), ``length_guidance``
    (:class:`LengthGuidance` and :class:`LengthValue`), ``grammar`` (``Generate.grammar``) and ``vision`` (:class:`Image`)."""
    limits: Limits
    lenvm_gamma: float | None = None
    """Gamma where ``LengthGuidance.gamma`` names none; None without a length model."""
    lenvm_calibration: Calibration | None = None
    """None without a length model, and for one that names none."""
    classes: list[str] = []
    """Names of the classes of the model's head, in the order of :class:`Classes` rows; one for a reward model."""
    multi_label: bool = False
    """Whether classes exclude each other (False: softmax) or not (True: sigmoid)."""
    regression: bool = False
    """Whether the head's outputs are numbers, which no function makes probabilities."""
    embedding_size: int = 0
    """Length of an :class:`Embedding` row; 0 where the model does not embed."""
    pooling: str = ""
    """How an :class:`Embedding` is made of hidden states: ``cls``, ``last``, ``mean``, ``mean_sqrt``, ``max`` or ``weightedmean``.
    Empty where the model does not embed."""
    token_vector_size: int = 0
    """Length of each vector of :class:`TokenVectors`; 0 where the model has none."""
    encoder: bool = False
    """Whether all tokens attend to each other. A prompt is then computed whole; where it has a prefix, the two are a pair, and
    tokens of the branch have token type 1."""
    arithmetic: str = ""
    """Number formats that the model computes in, for people: ``float32``, or ``float32, matrix products in int8 (avx512_vnni)``."""
    attention: AttentionChoice | None = None
    """None from an engine that does not say."""
    vision: VisionInfo | None = None
    """None where the model reads no images."""
    slot_bytes: int = 0
    """Bytes of keys and values of one token; 0 from an engine that does not say."""


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Snapshot of an engine's counters and gauges. The docstrings are the help of its metrics (:mod:`engine.server.metrics`)."""

    running: int
    """Requests in progress."""
    waiting: int
    """Requests in the queue."""
    slots_total: int
    """Slots for keys and values, one a token."""
    slots_free: int
    """Free slots."""
    slots_cached: int
    """Slots that only the prefix cache holds: they can be freed at once."""
    steps: int
    """Forward passes."""
    computed_tokens: int
    """Tokens computed by the model."""
    cached_tokens: int
    """Prefix tokens found in the prefix cache."""
    slots_items: int = 0
    """Slots of items that came first, in the prefix cache."""
    item_bytes: int = 0
    """Bytes of keys and values of items in the prefix cache."""
    slots_reserved: int = 0
    """Slots that items never take from generations and queries."""
    scored_items: int = 0
    """Items scored that came before the query."""
    cached_items: int = 0
    """Scored items that were in the prefix cache whole."""
    evicted_item_tokens: int = 0
    """Tokens of items that were evicted from the prefix cache."""
    replayed_steps: int = 0
    """Steps whose launches were replayed from a CUDA graph."""
    attention_fallback: int = 0
    """1 if `auto` could not choose the fastest attention backend."""
    draft_tokens: int = 0
    """Tokens of prompt-lookup drafts computed by the model."""
    accepted_draft_tokens: int = 0
    """Drafted tokens that were drawn."""
    lenvm_tokens: int = 0
    """Tokens that the length model computed, candidates included."""
    guided_draws: int = 0
    """Draws that used the length model's values."""
    decided_draws: int = 0
    """Draws of guided requests that were decided without the length model."""
    replayed_lenvm_passes: int = 0
    """Passes of the length model whose launches were replayed from a CUDA graph."""
    late_compilations: int = 0
    """Triton kernels that were compiled or loaded after the engine was ready. Each delays the requests in progress."""
    wait_seconds: float = 0.0
    """Expected queue time of a new request, of the tenant for which it is longest."""
    tenants: int = 0
    """Tenants with a request that has not ended."""
    refused_invalid: int = 0
    """Requests refused because they were faulty."""
    refused_queue: int = 0
    """Requests refused because the queue was full."""
    refused_wait: int = 0
    """Requests refused because they would have waited too long."""
    refused_adapter: int = 0
    """Requests refused because the engine does not have their adapter."""
    displaced: int = 0
    """Waiting requests that lost their place in a full queue to a tenant with fewer requests in it."""
    structured_requests: int = 0
    """Generations whose output follows a grammar."""
    compiled_grammars: int = 0
    """Grammars compiled; one that is in use or was used lately is compiled once."""
    refused_grammars: int = 0
    """Grammars that are not valid, or take too much time or memory."""
    compile_seconds: float = 0.0
    """Time spent in checking and compiling grammars, of refused ones as well."""
    compiling: int = 0
    """Requests that wait until their grammar is compiled."""
    grammar_bytes: int = 0
    """Memory of compiled grammars, kept ones and those in use."""
    masks: int = 0
    """Sets of allowed tokens computed from grammars, one for each token drawn."""
    mask_seconds: float = 0.0
    """Time spent in computing sets of allowed tokens, of all threads together."""
    adapters: int = 0
    """Adapters in host memory that requests may name."""
    adapter_bytes: int = 0
    """Host memory of all adapters, of unloaded ones that requests still use as well."""
    adapter_loads: int = 0
    """LoRA adapters loaded."""
    adapter_load_failures: int = 0
    """LoRA adapters that could not be loaded."""
    adapter_load_seconds: float = 0.0
    """Time spent in reading and checking adapters, also of those that could not be loaded."""
    adapter_swaps: int = 0
    """Copies of a LoRA adapter from host memory to a slot of the device."""
    computed_images: int = 0
    """Images that vision towers embedded; with a length model, each counts once for each model."""
    cached_images: int = 0
    """Times that a request needed embeddings that were there."""
    image_bytes: int = 0
    """Embeddings of images on the device."""
    tower_seconds: float = 0.0
    """Time that vision towers took."""


class TokenizerFiles(msgspec.Struct, tag="tokenizer", frozen=True):
    """A model's text side, as opaque to the engine as it is needed by the gateway."""

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    """Names as in ``tokenizer_config.json`` (``bos_token``, ``eos_token``, ...) to their text: the variables of chat templates."""
    preset: str | None = None
    """Contents of ``yardstick.toml`` beside the weights: how the model is prompted and read."""
    architecture: str = ""
    """The first of ``architectures`` in the model's ``config.json``."""
    model_files: dict[str, bytes] = {}
    """Contents of the sentence-transformers files of the directory, by relative path: ``modules.json``,
    ``config_sentence_transformers.json``, ``sentence_bert_config.json``, and the ``config.json`` of each module; Stanford's
    ``artifact.metadata``; and of the model's own ``config.json`` the keys with which a cross-encoder names its activation."""
    tool_template: str | None = None
    """A chat template of its own for conversations with tools."""


_COMMIT = re.compile("[0-9a-f]{40}")
_GGUF_NAME = re.compile(r"(?:[^:]*:)?([^:]+?)(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)


def served_name(model: str) -> str:
    """Return the name under which a directory or hub id is served: its last part, NAME for a snapshot in the hub's cache
    (``models--ORG--NAME/snapshots/…``), and for another directory that is called by a commit, what its ``config.json`` says. A GGUF
    file is served by its name without ``.gguf`` and the number of its part."""
    path = Path(os.path.abspath(model))  # noqa: PTH100  a link has a name of its own
    if gguf := _GGUF_NAME.fullmatch(path.name):
        return gguf[1]
    cached = path.parent.parent.name.split("--") if path.parent.name == "snapshots" else []
    if cached[:1] == ["models"]:
        return cached[-1]
    if not _COMMIT.fullmatch(path.name):
        return path.name
    try:
        written = msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return path.name
    return PurePath(str(written.get("_name_or_path", ""))).name or path.name


class Labels(msgspec.Struct, tag="labels", frozen=True, omit_defaults=True):
    """Log-probabilities of ``tokens`` as the next token, over the full vocabulary. A row has one number for each."""

    tokens: Annotated[list[int], Meta(min_length=1)]
    raw: bool = False
    """Logits instead of log-probabilities."""


class Likelihood(msgspec.Struct, tag="likelihood", frozen=True):
    """Log-probability of each token of the branch, given the prefix and the branch's tokens before it.

    The prefix has at least one token. A row has one number for each token of the branch, and a last one: 1 where each of them was
    the most probable token at its place, otherwise 0.
    """


class Classes(msgspec.Struct, tag="classes", frozen=True):
    """Logits of the model's classification or reward head. A row has one number for each of ``Info.classes``. Only where
    ``Info.capabilities`` has ``classify``."""


class Embedding(msgspec.Struct, tag="embedding", frozen=True, omit_defaults=True):
    """The pooled hidden state of the prompt. Only where ``Info.capabilities`` has ``embed``."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Length of the row: its first numbers are kept (Matryoshka). At most ``Info.embedding_size``; None keeps all."""
    normalize: bool = True
    """Scale to length 1, after numbers are cut off."""
    prompt_tokens: Count = 0
    """Tokens at the beginning of each branch that a mean, sum or maximum leaves out: those of the prompt, if the model's pooling
    does not include it (``include_prompt``). Only of an encoder."""


class TokenVectors(msgspec.Struct, tag="token_vectors", frozen=True, omit_defaults=True):
    """A vector for each token of the branch (ColBERT). A row has those of all tokens, one after the other, each of
    ``Info.token_vector_size`` numbers. Only where ``Info.capabilities`` has ``token_vectors``."""

    normalize: bool = True
    """Scale each vector to length 1."""
    expansion_tokens: Count = 0
    """Tokens at the end of each branch to which no token attends, as ColBERT fills up queries; fewer than the branch has."""


class Sparse(msgspec.Struct, tag="sparse", frozen=True, omit_defaults=True):
    """Weights of vocabulary entries (SPLADE, bge-m3). A row has the id and the weight of each entry whose weight is not 0, in the
    order of ids. Only where ``Info.capabilities`` has ``sparse``."""

    query: bool = False
    """Whether the texts are queries. Some models weigh the tokens of these by a table."""


class LengthValue(msgspec.Struct, tag="length_value", frozen=True):
    """The length model's estimate. A row has one number: z of v = sigmoid(z) = 1 − gamma^(tokens to come); v itself rounds to 1 for
    long texts. Only where ``Info.capabilities`` has ``length_guidance``."""


ScoreReadout = Labels | Likelihood | Classes | Embedding | TokenVectors | Sparse | LengthValue
"""The kinds of output of a :class:`Score`; one row for each branch."""


class Score(msgspec.Struct, tag="score", frozen=True, omit_defaults=True):
    """Read ``readout`` after each prompt ``prefix + branches[i]``, without decoding. A branch has at least one token."""

    id: str
    prefix: list[int]
    branches: list[list[int]]
    readout: ScoreReadout
    priority: int = 0
    """Lower runs earlier among the requests of one tenant; equal priorities run in order of arrival. A priority never moves a
    request ahead of another tenant's requests. Requests age: one of priority p is served like one of priority 0 that came p times
    5 seconds later (:data:`engine.scheduling.fair_queue.AGING_SECONDS`). Priorities beyond -10 and 10 count as these."""
    deadline: float | None = None
    """Seconds from receipt until the request expires; items that are not computed by then are dropped."""
    caller: Caller = Caller()
    adapter: str = ""
    """Digest of an adapter (:class:`engine.wire.Adapter`); empty: the base model."""
    images: list[Image] = []
    """Each image once, however often the prompts name it. Only where ``Info.vision`` is given."""


class ScoreItems(msgspec.Struct, tag="score_items", frozen=True, omit_defaults=True):
    """Read ``readout`` after each prompt ``item + query``, without decoding.

    Each item is a prefix of its own that stays in the prefix cache, so a later query computes only its own tokens. The query is the
    branch of each item and has at least one token; an item may be empty. Token ids of items are packed (:mod:`engine.wire.common`),
    because a message has tens of thousands of them.
    """

    id: str
    items: bytes
    """Token ids of all items, one after another."""
    lengths: bytes
    """Length of each item, in tokens."""
    query: Annotated[list[int], Meta(min_length=1)]
    readout: ScoreReadout
    priority: int = 0
    """See :class:`Score`."""
    deadline: float | None = None
    """See :class:`Score`."""
    caller: Caller = Caller()
    adapter: str = ""
    """See :class:`Score`."""
    images: list[Image] = []
    """Each image once, however often the prompts name it. Only where ``Info.vision`` is given."""


class Scored(msgspec.Struct, tag="scored", frozen=True):
    """The answer to :class:`Score` and :class:`ScoreItems`."""

    id: str
    rows: list[list[float]]
    """[branch or item][number]; the readout says which numbers. Logarithms are natural."""
    cached_tokens: int
    """Prefix tokens that were found in the prefix cache of the model that computed the rows."""
    computed_tokens: int
    """Tokens that went through the model for this request."""
    queue_seconds: float = 0.0
    """Time from the receipt of the whole request by the engine's HTTP server to the first step that computed a part of it."""
    cached_items: int = 0
    """Items of :class:`ScoreItems` that were in the prefix cache whole."""


def row_length(readout: ScoreReadout, branch: Sequence[int], info: Info) -> int:
    """Return the number of numbers in the row of ``readout`` for ``branch``; of :class:`Sparse`, the most that it can have."""
    match readout:
        case Labels():
            return len(readout.tokens)
        case Likelihood():
            return len(branch) + 1
        case Classes():
            return len(info.classes)
        case Embedding():
            return readout.dimensions or info.embedding_size
        case TokenVectors():
            return len(branch) * info.token_vector_size
        case Sparse():
            return 2 * info.vocab_size
        case LengthValue():
            return 1


Request = Score | ScoreItems | Generate | Abort
Reply = Scored | Delta | Failed
_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30
MEDIA_TYPE = "application/msgpack"
"""Type of every body of the contract."""
_encoder = msgspec.msgpack.Encoder(enc_hook=array.tolist)
"""Token ids may be arrays in messages that are sent; they are encoded as lists."""
_reply = msgspec.msgpack.Decoder(Reply)


def encode(message: msgspec.Struct) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def pack_frame(message: msgspec.Struct) -> bytes:
    """One message as a length-prefixed frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into :data:`Reply` messages, whatever the chunks it arrives in."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        """``max_frame``: most bytes of a message."""
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Reply]:
        """Return the messages completed by ``chunk``. Raises ``msgspec.DecodeError`` on garbage."""
        if not self._buffer and 0 < int.from_bytes(chunk[:4], "little") == len(chunk) - 4:
            return [_reply.decode(chunk[4:])]  # one message, as nearly always
        replies: list[Reply] = []
        self._buffer += chunk
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_frame:
                raise msgspec.DecodeError(f"frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            replies.append(_reply.decode(bytes(memoryview(self._buffer)[_LENGTH.size : end])))
            del self._buffer[:end]
        return replies

    @property
    def pending(self) -> int:
        """Bytes of an incomplete message; not 0 at the end of a stream means that it was cut off."""
        return len(self._buffer)
