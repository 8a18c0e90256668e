"""Checks of a message against the limits of the model that serves it. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine import wire
from engine.checks import generation, images, items, scoring

MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""Range of :attr:`engine.wire.Caller.weight`."""
MAX_CALLER_CHARACTERS = 512
"""Longest string in :class:`engine.wire.Caller`."""
NEEDED: dict[type[wire.ScoreReadout], str] = {
    wire.Labels: "score",
    wire.Likelihood: "score",
    wire.Classes: "classify",
    wire.Embedding: "embed",
    wire.LengthValue: "length_guidance",
}
"""Capability that each readout needs."""


def check(message: wire.Score | wire.ScoreItems | wire.Generate, info: wire.Info) -> str | None:
    """Return the problem with ``message`` for a model like ``info``, as a sentence for the caller; None if there is none."""
    problem = _caller_problem(message.caller)
    if problem is not None:
        return problem
    lacking = _lacking(message, info)
    if lacking == "grammar":
        return "The output of this model cannot follow a grammar."
    if lacking == "length_guidance":
        return "This engine has no length model."
    if lacking is not None:
        able = [name for name in info.capabilities if name not in {"length_guidance", "grammar", "vision"}]
        return f"This model cannot {lacking}; it can {' and '.join(able)}."
    if message.images:
        problem = images.problem(message, info)
        if problem is not None or info.vision is None:
            return problem
        message = images.as_text(message, info.vision)
    return next(_problems(message, info), None)


def _problems(message: wire.Score | wire.ScoreItems | wire.Generate, info: wire.Info) -> Iterator[str]:
    if isinstance(message, wire.Generate):
        return generation.problems(message, info)
    if isinstance(message, wire.ScoreItems):
        return items.problems(message, info)
    return scoring.problems(message, info)


def _lacking(message: wire.Score | wire.ScoreItems | wire.Generate, info: wire.Info) -> str | None:
    """Return the first capability that ``message`` needs and the model lacks."""
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
