"""Messages between the HTTP server of a pod and its loop process, in msgpack over ZMQ. No torch.

The server sends :data:`engine.wire.Request` messages, the bytes that it received: it reads their headers only. It puts the time of
receipt before each message that asks for a result (:func:`stamped`). The loop process
first sends one :class:`Ready` or one :class:`StartFailed`, then a :class:`StepDone` after every step, and one without replies
every :data:`BEAT_SECONDS` while it has no work. The thread that computes sends them, so a loop that hangs sends nothing. A thread
that loads adapters answers :class:`AdapterCommand` messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from yardstick_llm.engine import wire

BEAT_SECONDS = 0.5
"""Time between two beats of a loop without work."""
_TIME = struct.Struct("<d")


def stamped(body: bytes, received: float) -> list[bytes]:
    """Return the frames of a message that the server received at ``received``, in seconds of :func:`time.monotonic`.

    The system has one such clock for all its processes.
    """
    return [_TIME.pack(received), body]


def unstamped(frames: Sequence[bytes]) -> tuple[bytes, float | None]:
    """Return the message of ``frames``, and when the server received it; None for a message of the server's own."""
    *stamp, body = frames
    return body, _TIME.unpack(stamp[0])[0] if stamp else None


class ScoreHeader(msgspec.Struct, tag="score", frozen=True):
    """The part of a :class:`engine.wire.Score` that the server reads."""

    id: str
    sequences: ClassVar[int] = 1
    """Replies that end the request."""


class ScoreItemsHeader(ScoreHeader, tag="score_items", frozen=True):
    """The part of a :class:`engine.wire.ScoreItems` that the server reads."""


class SamplingHeader(msgspec.Struct, frozen=True):
    """The part of a :class:`engine.wire.Sampling` that the server reads."""

    n: int = 1


class GenerateHeader(msgspec.Struct, tag="generate", frozen=True):
    """The part of a :class:`engine.wire.Generate` that the server reads."""

    id: str
    sampling: SamplingHeader = SamplingHeader()

    @property
    def sequences(self) -> int:
        """Deltas with ``finish`` that end the request."""
        return max(1, self.sampling.n)


class AdapterCommand(msgspec.Struct, tag="adapter_command", frozen=True):
    """Load or unload an adapter."""

    id: str
    command: wire.LoadAdapter | wire.UnloadAdapter


ScoringHeader = ScoreHeader | ScoreItemsHeader
Header = ScoringHeader | GenerateHeader


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded."""

    info: wire.Info
    tokenizer: wire.TokenizerFiles
    stats: wire.Stats
    """Before the first step."""
    adapters: wire.Adapters


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True):
    """The model cannot be served; the process ends."""

    message: str
    """One line for the person who started the engine."""


class StepDone(msgspec.Struct, tag="step", frozen=True):
    """Replies and statistics after one step, or statistics of a loop without work, whose adapters may have changed."""

    replies: list[wire.Reply]
    stats: wire.Stats


class AdaptersChanged(msgspec.Struct, tag="adapters_changed", frozen=True):
    """All adapters, after one was loaded or unloaded."""

    adapters: wire.Adapters


class AdapterDone(msgspec.Struct, tag="adapter_done", frozen=True):
    """The answer to an :class:`AdapterCommand`, after the :class:`AdaptersChanged` that it causes. None: unloaded."""

    id: str
    result: wire.Adapter | wire.Failed | None


Event = Ready | StartFailed | StepDone | AdaptersChanged | AdapterDone
