"""Errors of a connection to an engine, and answers that are no numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine import wire
from gateway.errors import EngineLost, EngineSilent, InternalError, NotANumber, NotReady

MAX_SPOILT = 8
"""Answers in succession in which no row is a number, from which on an engine is at fault, and not the prompts."""


@dataclass(slots=True)
class Spoilt:
    """Answers of an engine in succession that had no number in any row."""

    count: int = 0


def unreachable() -> NotReady:
    """The error if no connection can be made."""
    return NotReady("The model's engine cannot be reached; try again soon.", retry_after=1, retryable=True)


def silent() -> EngineSilent:
    """The error if nothing was received for too long."""
    return EngineSilent("The engine was silent for too long; try again, or ask for less at once.")


def lost() -> EngineLost:
    """The error if the connection broke."""
    return EngineLost("The connection to the engine broke; try again.", retryable=True)


def overflow() -> NotANumber:
    """The error for a prompt whose row is no number."""
    return NotANumber("The model's numbers overflow for this prompt; change it, or serve another --dtype.")


def unreadable() -> EngineLost:
    """The error for an answer that is not valid."""
    return EngineLost("The engine's answer cannot be read; its version may not match the gateway's.")


def check_rows(rows: list[list[float]], row_lengths: list[int], readout: wire.ScoreReadout, spoilt: Spoilt) -> None:
    """Raise :class:`InternalError` unless ``rows`` have these lengths, and if the engine's last answers, which ``spoilt`` counts,
    had no numbers in any row."""
    if list(map(len, rows)) != row_lengths:
        raise InternalError("The engine's scores are incomplete; its model may be broken.", retryable=True)
    spoilt.count = spoilt.count + 1 if rows and len(spoilt_rows(rows, readout)) == len(rows) else 0
    if spoilt.count >= MAX_SPOILT:
        raise InternalError("The engine's scores are not numbers; its model may be broken.", retryable=True)


class Numbers(NamedTuple):
    """An answer with the rows that are numbers."""

    scored: wire.Scored
    indices: list[int]
    """Branches of these rows."""
    spoilt: list[int]
    """Branches of the other rows."""


def numbers_of(scored: wire.Scored, readout: wire.ScoreReadout, indices: list[int]) -> Numbers:
    """Divide an answer. ``indices``: of the branch of each row."""
    spoilt = spoilt_rows(scored.rows, readout)
    if not spoilt:
        return Numbers(scored, indices, [])
    kept = [place for place in range(len(indices)) if place not in spoilt]
    scored = msgspec.structs.replace(scored, rows=[scored.rows[place] for place in kept])
    return Numbers(scored, [indices[place] for place in kept], [indices[place] for place in sorted(spoilt)])


def spoilt_rows(rows: list[list[float]], readout: wire.ScoreReadout) -> set[int]:
    """Places of rows that are not numbers. Minus infinity is valid as a log-probability only."""
    invalid = math.isnan if isinstance(readout, wire.Labels | wire.Likelihood) else _not_finite
    sums = list(map(sum, rows))  # of finite numbers and minus infinity, one that is no number spoils the sum
    return {place for place, total in enumerate(sums) if invalid(total)} if invalid(sum(sums)) else set()


def _not_finite(number: float) -> bool:
    return not math.isfinite(number)
