"""Checks of a :class:`engine.wire.Generate`. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from engine import wire
from engine.checks.token_ids import known
from engine.requests.length_guidance import problems as guidance_problems

_RANGES = (
    ("max_tokens", 0, 1 << 30),
    ("min_tokens", 0, 1 << 30),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 1 << 30),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("seed", 0, (1 << 64) - 1),
)


def problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``message``, as sentences."""
    yield from _sampling_problems(message, info)
    yield from _constraint_problems(message, info)
    yield from guidance_problems(message, info)


def _sampling_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    limits, sampling = info.limits, message.sampling
    if message.tokens_per_delta < 1:
        yield f"tokens_per_delta is {message.tokens_per_delta}; at least 1 is needed."
    if not message.prompt or not known(message.prompt, info):
        yield f"The prompt must be one or more token ids between 0 and {info.vocab_size - 1}."
    if not known(sampling.logit_bias, info) or not known(sampling.stop_token_ids, info):
        yield f"Token ids in logit_bias and stop_token_ids must be between 0 and {info.vocab_size - 1}."
    limit = message.thinking_limit
    if limit is not None and (limit.tokens < 0 or not known(_tags(limit.thinking), info)):
        yield f"thinking_limit needs 0 or more tokens, and tags between 0 and {info.vocab_size - 1}."
    lookup = message.prompt_lookup
    if lookup is not None and not (0 <= lookup.max_tokens <= wire.MAX_DRAFT_TOKENS and 1 <= lookup.ngram <= wire.MAX_NGRAM):
        yield f"prompt_lookup takes max_tokens of 0 to {wire.MAX_DRAFT_TOKENS} and ngram of 1 to {wire.MAX_NGRAM}."
    if not 1 <= sampling.n <= limits.max_sequences:
        yield f"n is {sampling.n}; between 1 and {limits.max_sequences} is allowed."
    if not 0 <= message.resume_offset < len(message.prompt) or (message.resume_offset and sampling.n != 1):
        yield "resume_offset must be less than the prompt's length, and n must be 1 with it."
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(message, name)
        if count is not None and not 0 <= count <= limits.max_logprobs:
            yield f"{name} is {count}; between 0 and {limits.max_logprobs} is allowed."
    if not 0 <= message.index <= limits.max_sequences - sampling.n:
        yield f"index is {message.index}; with n it may reach {limits.max_sequences}."
    total = len(message.prompt) + max(sampling.max_tokens - message.resume_offset, 0)
    if total > min(info.max_context, limits.max_slots):
        yield f"Prompt and max_tokens come to {total} tokens; {min(info.max_context, limits.max_slots)} fit."
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not low <= value <= high:
            yield f"{name} is {value}; between {low:g} and {high:g} is allowed."
    if sampling.top_p <= 0 or sampling.repetition_penalty <= 0:
        yield "top_p and repetition_penalty must be greater than 0."
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        yield "Values of logit_bias must be finite numbers."


def _tags(thinking: wire.Thinking) -> list[int]:
    return [thinking.close, *([] if thinking.open is None else [thinking.open])]


def _constraint_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    sampling = message.sampling
    allowed, banned = sampling.allowed_token_ids, list(itertools.chain(*sampling.bad_words))
    if len(message.grammar.encode()) > wire.MAX_GRAMMAR_BYTES:
        yield f"The grammar has more than {wire.MAX_GRAMMAR_BYTES} bytes."
    if message.grammar and sampling.ignore_eos:
        yield "ignore_eos contradicts a grammar, whose output ends where it is complete."
    if allowed is not None and not (allowed and known(allowed, info)):
        yield f"allowed_token_ids must be one or more token ids between 0 and {info.vocab_size - 1}."
    if len(banned) > wire.MAX_BAD_TOKENS:
        yield f"bad_words have {len(banned)} tokens; at most {wire.MAX_BAD_TOKENS} are allowed."
    if not known(banned, info) or not all(sampling.bad_words):
        yield f"Each of bad_words must be one or more token ids between 0 and {info.vocab_size - 1}."
