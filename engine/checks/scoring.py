"""Checks of a :class:`engine.wire.Score`, and of readouts. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine import wire
from engine.checks.token_ids import all_known, known

MAX_NUMBERS = 1 << 18
"""Most numbers in the answer to a :class:`engine.wire.Score` of several branches: 8 times as many as a gateway asks for in one
message, and twice as many as a message of the gateway has tokens, each of which may have a log-probability. The row of a single
branch is bounded by the context."""
MAX_REPEATED_TOKENS = 1 << 22
"""Most tokens of the prefix times branches of an embedding, because means are computed from a copy of the prefix in each branch."""


def problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``message``, as sentences."""
    yield from readout_problems(message.readout, info)
    yield from _branch_problems(message, info)
    yield from _answer_problems(message, info)


def readout_problems(readout: wire.ScoreReadout, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``readout``, as sentences."""
    if isinstance(readout, wire.Labels):
        if not 1 <= len(readout.tokens) <= info.limits.max_labels:
            yield f"{len(readout.tokens)} labels, between 1 and {info.limits.max_labels} are allowed."
        if not known(readout.tokens, info):
            yield f"Label ids must be between 0 and {info.vocab_size - 1}."
    elif isinstance(readout, wire.Embedding):
        dimensions = readout.dimensions
        if dimensions is not None and not 1 <= dimensions <= info.embedding_size:
            yield f"dimensions is {dimensions}; between 1 and {info.embedding_size} is allowed."


def _branch_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    limits = info.limits
    if len(message.branches) > limits.max_branches:
        yield f"{len(message.branches)} branches, at most {limits.max_branches} are allowed."
    if not known(message.prefix, info):
        yield f"The prefix has a token id that is not between 0 and {info.vocab_size - 1}."
    most = min(info.max_context, limits.max_slots) - len(message.prefix)
    every_id_known = all_known(message.branches, info)
    for index, branch in enumerate(message.branches):
        if not branch:
            yield f"Branch {index} is empty."
        if not (every_id_known or known(branch, info)):
            yield f"Branch {index} has a token id that is not between 0 and {info.vocab_size - 1}."
        if len(branch) > most:
            yield f"Branch {index} makes a prompt of {len(message.prefix) + len(branch)} tokens; {most + len(message.prefix)} fit."


def _answer_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    if isinstance(message.readout, wire.Likelihood) and message.branches and not message.prefix:
        yield "The prefix is empty; the likelihood of a branch needs at least one token before it."
    repeated = len(message.prefix) * len(message.branches)
    if isinstance(message.readout, wire.Embedding) and repeated > MAX_REPEATED_TOKENS:
        yield f"A prefix of {len(message.prefix)} tokens for {len(message.branches)} branches is too long; send fewer branches."
    numbers = sum(wire.row_length(message.readout, branch, info) for branch in message.branches)
    if numbers > MAX_NUMBERS and len(message.branches) > 1:
        yield f"The answer would have {numbers} numbers, at most {MAX_NUMBERS} are allowed; send fewer branches."
