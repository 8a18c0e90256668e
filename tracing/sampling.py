"""Which requests are traced."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from yardstick_llm.tracing.context import TraceContext

logger = logging.getLogger(__name__)

_BITS = (1 << 64) - 1
_RATIOS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""Samplers of ``OTEL_TRACES_SAMPLER``, also with ``parentbased_`` before them; None: ``OTEL_TRACES_SAMPLER_ARG``."""


class Sampler(NamedTuple):
    """Samples traces by their id, so that servers with equal ratios choose the same traces."""

    ratio: float
    """Part of the traces that are sampled."""
    follows_parent: bool = True
    """Whether a request with a trace context is sampled exactly if its sender sampled it."""

    def samples(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether to trace a request."""
        if parent is not None and self.follows_parent:
            return parent.sampled
        return trace_id & _BITS < round(self.ratio * (_BITS + 1))


def sampler_of(environment: Mapping[str, str]) -> Sampler:
    """Return the sampler that the variables of OpenTelemetry ask for, by default of all traces."""
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    kind = name.removeprefix("parentbased_")
    if kind not in _RATIOS:
        logger.warning("OTEL_TRACES_SAMPLER: %r is not known; all requests are traced", name)
        return Sampler(1.0)
    chosen = _RATIOS[kind]
    return Sampler(_argument(environment) if chosen is None else chosen, follows_parent=kind != name)


def _argument(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if 0 <= ratio <= 1:
        return ratio
    logger.warning("OTEL_TRACES_SAMPLER_ARG: %r is not a number from 0 to 1; all requests are traced", text)
    return 1.0
