"""The replies to messages that the engine does not accept, which are counted and logged, and to those whose step failed."""

from __future__ import annotations

from typing import Literal

import torch

from engine import wire
from engine.checks import MAX_CALLER_CHARACTERS
from engine.replies.counters import Refused
from engine.replies.request_log import RequestLog

Message = wire.Score | wire.ScoreItems | wire.Generate
QUEUE_FULL = "The engine's queue is full."


class Refusals:
    """Refuses messages of one loop."""

    def __init__(self, counts: Refused, log: RequestLog) -> None:
        self._counts = counts
        self._log = log

    def invalid(self, request_id: str, problem: str, caller: wire.Caller | None = None) -> wire.Failed:
        """Refuse a faulty message. Its strings may be of any length, so the log gets their beginnings."""
        self._counts.invalid += 1
        shortened = wire.Caller()
        if caller is not None:
            shortened = wire.Caller(caller.request_id[:MAX_CALLER_CHARACTERS], caller.tenant[:MAX_CALLER_CHARACTERS])
        self._log.write("refused", shortened, request_id[:MAX_CALLER_CHARACTERS], code="invalid")
        return wire.Failed(request_id, "invalid", problem)

    def unknown_adapter(self, message: Message) -> wire.Failed:
        """Refuse a message whose adapter the engine does not have, or has no more."""
        self._counts.adapter += 1
        self._log.write("refused", message.caller, message.id, code="unknown_adapter")
        problem = "This engine has no adapter of this digest; load it, or name one that GET /adapters lists."
        return wire.Failed(message.id, "unknown_adapter", problem, retryable=True)

    def overloaded(self, message: Message, reason: Literal["wait", "queue_full"], wait: float) -> wire.Failed:
        """Refuse a message that would have to wait for ``wait`` seconds, too long, or for which the queue has no place."""
        if reason == "wait":
            self._counts.wait += 1
        else:
            self._counts.queue += 1
        self._log.write("refused", message.caller, message.id, code="overloaded", reason=reason, wait_seconds=round(wait, 3))
        return overloaded(message.id, wait)


def overloaded(request_id: str, wait: float) -> wire.Failed:
    """The reply to a request that would have to wait for ``wait`` seconds."""
    return wire.Failed(request_id, "overloaded", QUEUE_FULL, retryable=True, retry_after=max(1.0, wait))


def step_failed(request_id: str, error: Exception) -> wire.Failed:
    """Return the end of a request whose step failed with ``error``."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return wire.Failed(request_id, "out_of_memory", "The engine ran out of memory in this step.", retryable=True)
    return wire.Failed(request_id, "internal", "The engine failed in this step.", retryable=True)
