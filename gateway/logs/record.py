"""The record of one request, which the access log, the metrics and its trace read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from gateway.logs.account import Account

Outcome = Literal["ok", "client_gone", "error", "shutdown"]


@dataclass(slots=True)
class RequestRecord:
    """The course of a request up to now."""

    id: bytes
    began: float = field(default_factory=time.perf_counter)
    status: int = 499
    """Status of the response; 499 (client left) until it begins."""
    first_byte: float | None = None
    account: Account = field(default_factory=Account)
    outcome: Outcome = "ok"
    """Outcome of a stream after its beginning. For other responses the status tells this, unless the outcome is "shutdown"."""
    error: str | None = None
    """Code of the error in the response, or its type if it has no code."""

    @property
    def key_name(self) -> str | None:
        """Name of the API key; None without one."""
        return None

    @property
    def broke(self) -> bool:
        """Whether a stream ended with an error after a successful status."""
        return self.status < 400 and self.outcome in ("error", "shutdown")
