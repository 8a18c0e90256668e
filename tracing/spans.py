"""A span, as it is recorded while a request runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from yardstick_llm.tracing.context import TraceContext, new_span_id

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool | Sequence[str]


@dataclass(slots=True, eq=False)
class Span:
    """A part of a request. Times are nanoseconds since 1970."""

    name: str
    trace_id: int
    parent_id: int = 0
    """0: the first span of its trace."""
    kind: Kind = "internal"
    remote_parent: bool = False
    """Whether another process recorded the parent."""
    state: str = ""
    """``tracestate`` of the request."""
    begin: int = field(default_factory=time.time_ns)
    end: int = 0
    """0 until the span ends."""
    attributes: dict[str, Value] = field(default_factory=dict)
    """Numbers, names and codes; never texts, items, tokens or keys."""
    events: list[tuple[str, int]] = field(default_factory=list)
    """Names and times."""
    failed: bool = False
    span_id: int = field(default_factory=new_span_id)

    @property
    def context(self) -> TraceContext:
        """The context of what happens within this span."""
        return TraceContext(self.trace_id, self.span_id, sampled=True, state=self.state)

    def event(self, name: str) -> None:
        """Record that ``name`` happens now."""
        self.events.append((name, time.time_ns()))

    def finish(self, error: str | None = None) -> None:
        """End the span. ``error``: the code of the error with which it failed."""
        self.end = max(self.begin, time.time_ns())
        if error is not None:
            self.failed = True
            self.attributes["error.type"] = error
