"""Checks of a message against the limits of the model that serves it. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from engine import wire
from engine.length_guidance import problems as guidance_problems

MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""Range of :attr:`engine.wire.Caller.weight`."""
MOST_PIN_SECONDS = 86_400
"""Largest :attr:`engine.wire.ScoreItems.pin_seconds`: pins are renewed, so that what is forgotten ends."""
MAX_CALLER_CHARACTERS = 512
"""Longest string in :class:`engine.wire.Caller`."""
MAX_NUMBERS = 1 << 18
"""Most numbers in the answer to a :class:`engine.wire.Score` of several branches: 8 times as many as a gateway asks for in one
message, and twice as many as a message of the gateway has tokens, each of which may have a log-probability. The row of a single
branch is bounded by the context."""
MAX_REPEATED_TOKENS = 1 << 22
"""Most tokens of the prefix times branches of an embedding, because means are computed from a copy of the prefix in each branch."""

NEEDED: dict[type[wire.Readout], str] = {
    wire.Labels: "score",
    wire.Likelihood: "score",
    wire.Classes: "classify",
    wire.Embedding: "embed",
    wire.LengthValue: "length_guidance",
}
"""Capability that each readout needs."""


def check(message: wire.Score | wire.ScoreItems | wire.Generate, info: wire.Info) -> str | None:
    """The problem with ``message`` for a model like ``info``, as a sentence for the caller; None if there is none."""
    problem = _caller_problem(message.caller)
    if problem is not None:
        return problem
    lacking = _lacking(message, info)
    if lacking == "grammar":
        return "The output of this model cannot follow a grammar."
    if lacking == "length_guidance":
        return "This engine has no length model."
    if lacking is not None:
        able = [name for name in info.capabilities if name not in {"length_guidance", "grammar"}]
        return f"This model cannot {lacking}; it can {' and '.join(able)}."
    if isinstance(message, wire.Generate):
        problems = (_generate_problems(message, info), _constraint_problems(message, info), guidance_problems(message, info))
        return next(itertools.chain(*problems), None)
    if isinstance(message, wire.ScoreItems):
        return next(itertools.chain(_readout_problems(message.readout, info), _item_problems(message, info)), None)
    problems = (_readout_problems(message.readout, info), _branch_problems(message, info), _answer_problems(message, info))
    return next(itertools.chain(*problems), None)


def _lacking(message: wire.Score | wire.ScoreItems | wire.Generate, info: wire.Info) -> str | None:
    """The first capability that ``message`` needs and the model lacks."""
    if isinstance(message, wire.Score | wire.ScoreItems):
        needed = [NEEDED[type(message.readout)]]
    else:
        needed = ["generate"]
        needed += ["length_guidance"] if message.length_guidance is not None else []
        needed += ["grammar"] if message.grammar else []
    return next((name for name in needed if name not in info.capabilities), None)


def _caller_problem(caller: wire.Caller) -> str | None:
    if not MIN_WEIGHT <= caller.weight <= MAX_WEIGHT:  # not a number is neither
        return f"weight is {caller.weight}; between {MIN_WEIGHT:g} and {MAX_WEIGHT:g} is allowed."
    for name in ("request_id", "tenant", "cache_salt"):
        length = len(getattr(caller, name))
        if length > MAX_CALLER_CHARACTERS:
            return f"{name} has {length} characters; at most {MAX_CALLER_CHARACTERS} are allowed."
    return None


def _readout_problems(readout: wire.Readout, info: wire.Info) -> Iterator[str]:
    if isinstance(readout, wire.Labels):
        if not 1 <= len(readout.tokens) <= info.limits.max_labels:
            yield f"{len(readout.tokens)} labels, between 1 and {info.limits.max_labels} are allowed."
        if not _known(readout.tokens, info):
            yield f"Label ids must be between 0 and {info.vocab_size - 1}."
    elif isinstance(readout, wire.Embedding):
        dimensions = readout.dimensions
        if dimensions is not None and not 1 <= dimensions <= info.embedding_size:
            yield f"dimensions is {dimensions}; between 1 and {info.embedding_size} is allowed."


def _branch_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    limits = info.limits
    if len(message.branches) > limits.max_branches:
        yield f"{len(message.branches)} branches, at most {limits.max_branches} are allowed."
    if not _known(message.prefix, info):
        yield f"The prefix has a token id that is not between 0 and {info.vocab_size - 1}."
    most = min(info.max_context, limits.max_slots) - len(message.prefix)
    all_known = _all_known(message.branches, info)
    for index, branch in enumerate(message.branches):
        if not branch:
            yield f"Branch {index} is empty."
        if not (all_known or _known(branch, info)):
            yield f"Branch {index} has a token id that is not between 0 and {info.vocab_size - 1}."
        if len(branch) > most:
            yield f"Branch {index} makes a prompt of {len(message.prefix) + len(branch)} tokens; {most + len(message.prefix)} fit."


def _item_problems(message: wire.ScoreItems, info: wire.Info) -> Iterator[str]:
    if len(message.items) % 4 or len(message.lengths) % 4:
        yield "items and lengths must be 32-bit integers."
        return
    ids, lengths = np.frombuffer(message.items, "<i4"), np.frombuffer(message.lengths, "<i4")
    if len(lengths) > info.limits.max_branches:
        yield f"{len(lengths)} items, at most {info.limits.max_branches} are allowed."
    if (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != len(ids):
        yield "lengths must be those of the items."
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
        yield f"An item has a token id that is not between 0 and {info.vocab_size - 1}."
    if message.pin_seconds is not None and not 0 <= message.pin_seconds <= MOST_PIN_SECONDS:
        yield f"pin_seconds is {message.pin_seconds}; between 0 and {MOST_PIN_SECONDS} is allowed."
    if not message.query or not _known(message.query, info):
        yield f"The query must be one or more token ids between 0 and {info.vocab_size - 1}."
    longest, most = int(lengths.max(initial=0)), min(info.max_context, info.limits.max_slots)
    if longest + len(message.query) > most:
        yield f"An item makes a prompt of {longest + len(message.query)} tokens; {most} fit."
    if isinstance(message.readout, wire.Likelihood) and not lengths.all():
        yield "An item is empty; the likelihood of the query needs at least one token before it."
    numbers = len(lengths) * wire.row_length(message.readout, message.query, info)
    if numbers > MAX_NUMBERS and len(lengths) > 1:
        yield f"The answer would have {numbers} numbers, at most {MAX_NUMBERS} are allowed; send fewer items."


def _answer_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    if isinstance(message.readout, wire.Likelihood) and message.branches and not message.prefix:
        yield "The prefix is empty; the likelihood of a branch needs at least one token before it."
    repeated = len(message.prefix) * len(message.branches)
    if isinstance(message.readout, wire.Embedding) and repeated > MAX_REPEATED_TOKENS:
        yield f"A prefix of {len(message.prefix)} tokens for {len(message.branches)} branches is too long; send fewer branches."
    numbers = sum(wire.row_length(message.readout, branch, info) for branch in message.branches)
    if numbers > MAX_NUMBERS and len(message.branches) > 1:
        yield f"The answer would have {numbers} numbers, at most {MAX_NUMBERS} are allowed; send fewer branches."


def _generate_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    limits, sampling = info.limits, message.sampling
    if message.tokens_per_delta < 1:
        yield f"tokens_per_delta is {message.tokens_per_delta}; at least 1 is needed."
    if not message.prompt or not _known(message.prompt, info):
        yield f"The prompt must be one or more token ids between 0 and {info.vocab_size - 1}."
    if not _known(sampling.logit_bias, info) or not _known(sampling.stop_token_ids, info):
        yield f"Token ids in logit_bias and stop_token_ids must be between 0 and {info.vocab_size - 1}."
    limit = message.thinking_limit
    if limit is not None and (limit.tokens < 0 or not _known(_tags(limit.thinking), info)):
        yield f"thinking_limit needs 0 or more tokens, and tags between 0 and {info.vocab_size - 1}."
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
    if allowed is not None and not (allowed and _known(allowed, info)):
        yield f"allowed_token_ids must be one or more token ids between 0 and {info.vocab_size - 1}."
    if len(banned) > wire.MAX_BAD_TOKENS:
        yield f"bad_words have {len(banned)} tokens; at most {wire.MAX_BAD_TOKENS} are allowed."
    if not _known(banned, info) or not all(sampling.bad_words):
        yield f"Each of bad_words must be one or more token ids between 0 and {info.vocab_size - 1}."


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


def _all_known(branches: Collection[Sequence[int]], info: wire.Info) -> bool:
    """:func:`_known` of all branches together, in half of the time."""
    try:
        ids = np.fromiter(itertools.chain.from_iterable(branches), np.int64, sum(map(len, branches)))
    except OverflowError:
        return False
    return not ids.size or bool(ids.min() >= 0 and ids.max() < info.vocab_size)


def _known(tokens: Collection[int], info: wire.Info) -> bool:
    """Whether every token id is one of the model's."""
    return not tokens or (min(tokens) >= 0 and max(tokens) < info.vocab_size)
