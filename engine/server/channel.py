"""Messages between the HTTP server of a pod and its loop process, in msgpack over a pair of Unix sockets. No torch.

The server sends :data:`engine.wire.Request` messages, the bytes that it received: it reads their headers only. Before each message
is a header with its size and, if it asks for a result, the time of its receipt (:func:`header_of`). The loop process first sends
one :class:`Ready` or one :class:`StartFailed`, then a :class:`StepDone` after every step, and one without replies every
:data:`BEAT_SECONDS` while it has no work. The thread that computes sends them, so a loop that hangs sends nothing. A thread that
loads adapters answers :class:`AdapterCommand` messages.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
from typing import ClassVar, NamedTuple

import msgspec

from yardstick_llm.engine import wire

BEAT_SECONDS = 0.5
"""Time between two beats of a loop without work."""
_HEADER = struct.Struct("<Qd")
_READ_BYTES = 1 << 16


def header_of(body: bytes, received: float = math.nan) -> bytes:
    """Return what goes before a message. ``received``: when the server received it, in seconds of :func:`time.monotonic`, which is
    one clock for all processes of a system; NaN for a message of the server's own, and of the loop."""
    return _HEADER.pack(len(body), received)


class Message(NamedTuple):
    """A message that has arrived."""

    body: bytes
    received: float | None
    """See :func:`header_of`; None in place of NaN."""


class Unpacker:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes."""
        buffer, found = self._buffer, list[Message]()
        buffer += data
        while len(buffer) >= _HEADER.size:
            size, received = _HEADER.unpack_from(buffer)
            end = _HEADER.size + size
            if len(buffer) < end:
                break
            found.append(Message(bytes(memoryview(buffer)[_HEADER.size : end]), None if math.isnan(received) else received))
            del buffer[:end]
        return found


class LoopEnd:
    """The loop process's end of the connection. Threads may send at the same time."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._readable = select.poll()
        self._readable.register(descriptor, select.POLLIN)
        self._unpacker = Unpacker()
        self._sending = threading.Lock()

    def send(self, event: Event) -> None:
        """Send an event. The server reads at any time, so this waits for no more than its event loop. Raises OSError after its
        end."""
        body = wire.encode(event)
        with self._sending:
            self._socket.sendall(header_of(body) + body)

    def receive(self, seconds: float) -> list[Message]:
        """Return the messages that have arrived; wait for bytes for at most ``seconds``. Raises EOFError after the server's end."""
        if not self._readable.poll(1000 * seconds):
            return []
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise EOFError
        return self._unpacker.feed(data)


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
