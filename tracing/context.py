"""The header ``traceparent`` and its companion ``tracestate``: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

MAX_TRACEPARENT = 256
"""Longest accepted value, in characters; version 00 has 55."""
MAX_TRACESTATE = 512
"""Longest value that is passed on; the specification asks for at least this."""
MAX_MEMBERS = 32
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]", re.ASCII)
_SAMPLED = 1
_random = random.Random()  # its own, so that a program that seeds the module's generator repeats no ids


class TraceContext(NamedTuple):
    """Place in a trace: the trace, and the span that is the parent of what follows."""

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""
    """``tracestate``, for the next server; empty if there is none."""

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers for the next server."""
        parent = {"traceparent": f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"}
        return parent | {"tracestate": self.state} if self.state else parent


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Return the context in the headers of a request; None if ``traceparent`` is missing or malformed. An invalid ``tracestate`` is
    left out."""
    found = _PARENT.fullmatch(traceparent) if len(traceparent) <= MAX_TRACEPARENT else None
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    return TraceContext(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & _SAMPLED), _valid_state(tracestate))


def new_trace_id() -> int:
    """Return 128 random bits, not all 0."""
    return _random.getrandbits(128) or 1


def new_span_id() -> int:
    """Return 64 random bits, not all 0."""
    return _random.getrandbits(64) or 1


def _valid_state(state: str) -> str:
    """Return ``state``, or nothing if it is too long or not a list of members."""
    if not state or len(state) > MAX_TRACESTATE:
        return ""
    members = [member for part in state.split(",") if (member := part.strip(" \t"))]
    known = 0 < len(members) <= MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if known else ""
