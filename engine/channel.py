"""What the pod's server and its loop process say to each other over ZMQ, in msgpack. No torch.

The server sends :data:`engine.wire.Request` messages. The loop first sends one :class:`Ready` or one :class:`StartFailed`, then
a :class:`Step` whenever a step ended with something to tell.
"""

from __future__ import annotations

import msgspec

from engine import wire


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


Event = Ready | StartFailed | Step
