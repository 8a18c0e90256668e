"""Rules of a request's length guidance that the host decides from the message alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from engine import wire
from engine.ints import Ints


def effective(message: wire.Generate) -> wire.LengthGuidance | None:
    """The guidance of ``message``; None where it has no effect: with neutral settings."""
    guidance = message.length_guidance
    return None if guidance is None or guidance.neutral else guidance


@dataclass(slots=True)
class GuidedSection:
    """A section of one output, as far as the output is known."""

    thinking: wire.Thinking
    wanted: Literal["thinking", "answer"]
    begin: int | None = None
    """Output tokens before the section, if the next draw is in it; otherwise None."""
    settled: bool = False
    """Whether no further token changes this."""
    _searched: int = 0

    def read(self, output: Ints) -> None:
        """Follow the output. ``output``: all of its tokens so far; the ones that were read before are not read again."""
        if self.settled or not len(output):
            self._begin_opened()
            return
        opened = self.thinking.open
        if opened is not None and int(output[0]) != opened:  # no thinking section
            self.begin, self.settled = (0 if self.wanted == "answer" else None), True
            return
        found = np.flatnonzero(output[self._searched :] == self.thinking.close)
        if len(found):
            end = self._searched + int(found[0]) + 1
            self.begin, self.settled = (end if self.wanted == "answer" else None), True
        elif self.wanted == "thinking":
            self.begin = 0 if opened is None else 1
        self._searched = len(output)

    def _begin_opened(self) -> None:
        """The first draw is in the thinking section, if the prompt has begun it."""
        if not self.settled and self.wanted == "thinking" and self.thinking.open is None:
            self.begin = 0


def section_of(guidance: wire.LengthGuidance | None) -> GuidedSection | None:
    """The section of an output that ``guidance`` is for; None for all of it."""
    if guidance is None or guidance.applies_to == "both":
        return None
    assert guidance.thinking is not None
    return GuidedSection(guidance.thinking, guidance.applies_to)


def closing(guidance: wire.LengthGuidance) -> tuple[int, ...]:
    """The token that ends the guided section, where that is the thinking section."""
    return (guidance.thinking.close,) if guidance.applies_to == "thinking" and guidance.thinking else ()


def top_k(message: wire.Generate) -> int:
    """Largest number of candidates of a draw: the guidance's ``top_k``, or the sampling's where that is smaller."""
    guidance, own = message.length_guidance, message.sampling.top_k
    assert guidance is not None
    return min(guidance.top_k, own) if own > 0 else guidance.top_k


def target(guidance: wire.LengthGuidance, drawn: int, gamma: float) -> float:
    """Target of a constraint: tokens after the next draw, the end of sequence included. drawn: output tokens so far, of the guided
    section.

    A text of N tokens without its end still has N − drawn − 1 tokens and its end to come after the next draw.
    """
    if guidance.target_value is not None:
        value = min(guidance.target_value, 1 - wire.SMALLEST_VALUE)
        return math.log1p(-value) / math.log(gamma) if value > 0 else 0.0
    if guidance.target_length is None:
        return 0.0
    spent = drawn if guidance.target_length_mode == "total" else 0
    return float(max(guidance.target_length - spent, 0))


def problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    """Problems of the guidance of ``message``; each names its key."""
    guidance = message.length_guidance
    if guidance is None:
        return
    if guidance.mode not in get_args(wire.GuidanceMode):
        yield f"mode is {guidance.mode!r}; it must be one of {', '.join(get_args(wire.GuidanceMode))}."
    if not math.isfinite(guidance.scale):
        yield f"scale is {guidance.scale}; it must be a finite number."
    if guidance.gamma is not None and not 0 < guidance.gamma < 1:
        yield f"gamma is {guidance.gamma}; it must be greater than 0 and less than 1."
    if not 1 <= guidance.top_k <= info.limits.max_candidates:
        yield f"top_k of the guidance is {guidance.top_k}; between 1 and {info.limits.max_candidates} is allowed."
    if not 0 <= guidance.entropy_threshold < math.inf:
        yield f"entropy_threshold is {guidance.entropy_threshold}; it must be a finite number of 0 or more."
    if not 0 <= guidance.value_min <= 1:
        yield f"value_min is {guidance.value_min}; between 0 and 1 is allowed."
    if guidance.applies_to not in ("both", "thinking", "answer"):
        yield f"applies_to is {guidance.applies_to!r}; it must be both, thinking or answer."
    if guidance.applies_to != "both" and guidance.thinking is None:
        yield f"applies_to {guidance.applies_to} needs thinking."
    if message.sampling.temperature <= 0 and guidance.needs_draw:
        yield "At temperature 0 nothing is drawn: length_guidance needs constraint eq, ge or le, or a temperature above 0."
    if guidance.return_values and message.logprobs is None:
        yield "return_values needs logprobs."
    yield from _constraint_problems(guidance)


def _constraint_problems(guidance: wire.LengthGuidance) -> Iterator[str]:
    if guidance.constraint not in (None, *get_args(wire.LengthConstraint)):
        yield f"constraint is {guidance.constraint!r}; it must be one of {', '.join(get_args(wire.LengthConstraint))}."
    if guidance.target_length_mode not in ("total", "remaining"):
        yield f"target_length_mode is {guidance.target_length_mode!r}; it must be total or remaining."
    if guidance.target_length is not None and guidance.target_length < 0:
        yield f"target_length is {guidance.target_length}; it must be 0 or more."
    if guidance.target_value is not None and not 0 <= guidance.target_value <= 1:
        yield f"target_value is {guidance.target_value}; between 0 and 1 is allowed."
    targets = (guidance.target_length is not None) + (guidance.target_value is not None)
    if guidance.constraint is not None and targets != 1:
        yield f"constraint {guidance.constraint} needs target_length or target_value, and not both."
    if guidance.constraint is None and targets:
        yield "target_length and target_value need a constraint, such as eq."
