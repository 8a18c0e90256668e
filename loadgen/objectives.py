"""Objectives of a run: ``p99 <= 500ms``, ``failures == 0``, ``items_per_s >= 1000``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadgen.records import Record

TIMES = ("latency", "ttft", "tpot", "itl", "lag")
"""Times with percentiles; ``p99`` alone means the latency. ``itl``: gaps between pieces of a stream."""
RATES = ("requests_per_s", "items_per_s", "tokens_per_s", "goodput")
COUNTS = ("requests", "failures", "failure_rate", "cache_hit_rate")

_FORM = re.compile(
    r"\s*(?P<measure>[a-z_0-9.]+)\s*(?P<relation><=|>=|==|<|>)\s*(?P<bound>[0-9.]+(e-?[0-9]+)?)\s*(?P<unit>ms|s|%|)\s*"
)
_TIME = re.compile(rf"(?:(?P<of>{'|'.join(TIMES)})_)?(?P<what>p[0-9]+(\.[0-9]+)?|max|mean)")
_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_UNITS = {"ms": 0.001, "s": 1.0, "%": 0.01, "": 1.0}


@dataclass(frozen=True)
class Objective:
    """One comparison."""

    text: str
    measure: str
    """Key in a summary, such as ``latency_p99`` or ``failures``."""
    of: str | None
    """The time whose percentile, maximum or mean is compared; None for rates and counts."""
    relation: str
    bound: float
    """Bound in seconds, or a plain number."""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse an objective. Raises :class:`ValueError` with a message for its author."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"the objective {text!r} is not like `p99 <= 500ms` or `failures == 0`")
        measure, unit = found["measure"], found["unit"]
        time = _TIME.fullmatch(measure)
        if time is None and measure not in RATES + COUNTS:
            known = ", ".join(("p50 … p99.9, max, mean", *(f"{name}_p99" for name in TIMES[1:]), *RATES, *COUNTS))
            raise ValueError(f"the objective {text!r} names no measure; known: {known}")
        if (time is not None) != (unit in ("ms", "s")):
            raise ValueError(f"the objective {text!r} needs " + ("a unit, ms or s" if time else "no unit of time"))
        if time is not None and time["what"][0] == "p" and not 0 < float(time["what"][1:]) <= 100:
            raise ValueError(f"the objective {text!r} has a percentile that is not above 0 and at most 100")
        of = (time["of"] or "latency") if time is not None else None
        name = f"{of}_{time['what']}" if time is not None else measure
        return cls(text, name, of, found["relation"], float(found["bound"]) * _UNITS[unit])

    def met(self, value: float | None) -> bool:
        """Whether a run with this value meets the objective; a missing value does not."""
        return value is not None and _RELATIONS[self.relation](value, self.bound)

    def allows(self, record: Record) -> bool:
        """Whether a single request stays within the bound on its latency, TTFT or TPOT."""
        if self.of not in ("latency", "ttft", "tpot") or self.relation not in ("<", "<="):
            return True
        value: float | None = getattr(record, self.of)
        return value is None or self.met(value)


@dataclass(frozen=True)
class Verdict:
    """An objective and its result."""

    objective: Objective
    value: float | None

    @property
    def met(self) -> bool:
        """See :meth:`Objective.met`."""
        return self.objective.met(self.value)


def judge(objectives: list[Objective], values: Mapping[str, float]) -> list[Verdict]:
    """Return each objective with its value; None if it was not measured (nothing was sent, or no stream was read)."""
    measured = values if values["requests"] else {}
    return [Verdict(objective, measured.get(objective.measure)) for objective in objectives]
