"""What the pod's server and its loop process say to each other over ZMQ, in msgpack. No torch.

The server sends :data:`engine.wire.Request` messages. The loop first sends one :class:`Ready` or one :class:`StartFailed`, then
a :class:`Step` after every step, and a :class:`Beat` every :data:`BEAT_SECONDS` while it has no work. The thread that computes
sends them, so that a loop that hangs sends nothing.
"""

from __future__ import annotations

import msgspec

from engine import wire

BEAT_SECONDS = 0.5
"""Time between two beats of a loop without work."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded."""

    info: wire.Info
    tokenizer: wire.TokenizerFiles


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True):
    """The model cannot be served; the process ends."""

    message: str
    """One line for whoever started the engine."""


class Step(msgspec.Struct, tag="step", frozen=True):
    """What a step brought."""

    replies: list[wire.Reply]
    stats: wire.Stats


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """The loop has no work and waits for requests."""


Event = Ready | StartFailed | Step | Beat
