"""Checks of a :class:`engine.wire.ScoreItems`. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine import wire
from engine.checks.scoring import MAX_NUMBERS, readout_problems
from engine.checks.token_ids import known

MOST_PIN_SECONDS = 86_400
"""Largest :attr:`engine.wire.ScoreItems.pin_seconds`: pins are renewed, so that what is forgotten ends."""


def problems(message: wire.ScoreItems, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``message``, as sentences."""
    yield from readout_problems(message.readout, info)
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
    if not message.query or not known(message.query, info):
        yield f"The query must be one or more token ids between 0 and {info.vocab_size - 1}."
    longest, most = int(lengths.max(initial=0)), min(info.max_context, info.limits.max_slots)
    if longest + len(message.query) > most:
        yield f"An item makes a prompt of {longest + len(message.query)} tokens; {most} fit."
    if isinstance(message.readout, wire.Likelihood) and not lengths.all():
        yield "An item is empty; the likelihood of the query needs at least one token before it."
    numbers = len(lengths) * wire.row_length(message.readout, message.query, info)
    if numbers > MAX_NUMBERS and len(lengths) > 1:
        yield f"The answer would have {numbers} numbers, at most {MAX_NUMBERS} are allowed; send fewer items."
