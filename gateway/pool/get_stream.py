"""A connection to an engine for ``GET`` requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.pool.faults import unreadable
from gateway.pool.stream import EngineStream

MAX_OVERHEAD = 128 * 1024
"""Bytes of an answer beside its content and the content's frames: its head, and the body of a refusal."""


class Answer(NamedTuple):
    """An engine's complete answer."""

    status: int
    headers: Mapping[bytes, bytes]
    """By name in lower case."""
    content: bytes | bytearray


class GetStream(EngineStream):
    """An :class:`EngineStream` that keeps the headers of an answer, and bounds them."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: dict[bytes, bytes] = {}
        self._received = 0

    def send(self, request: bytes, silence_seconds: float, *, framed: bool = True) -> None:
        """See :meth:`EngineStream.send`."""
        self.headers, self._received = {}, 0
        super().send(request, silence_seconds, framed=framed)

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse a part of the answer."""
        super().data_received(data)
        self._received += len(data)
        if not self._complete and self._received > MAX_OVERHEAD + 2 * len(self._whole or b""):
            self._fail(unreadable())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers, which follow the content, are ignored."""
        if self.status == 0:
            self.headers[name.lower()] = value
