"""A transport that coalesces writes and can stop reading for two reasons at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

GATHER_BYTES = 64 * 1024


class GatheringTransport:
    """Joins all writes of one turn of the event loop into one; the extra system call dominates small answers."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_close: Callable[[], None]) -> None:
        """``on_close`` is called in place of closing ``transport``, after everything written before has been passed on."""
        self.inner = transport
        self._loop = loop
        self._on_close = on_close
        self._parts: list[bytes] = []
        self._gathered = 0
        self._held = False
        self._paused = False

    def write(self, data: bytes) -> None:
        """Pass ``data`` on before the event loop's next turn, or at once where much has been gathered."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._gathered += len(data)
        if self._gathered > GATHER_BYTES:  # so that the transport can apply backpressure within this turn
            self._flush()

    def close(self) -> None:
        """Close after everything written before."""
        self._flush()
        self._on_close()

    def pause_reading(self) -> None:
        """Stop reading on behalf of flow control."""
        self._paused = True
        if not self._held and not self.inner.is_closing():
            self.inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless held."""
        self._paused = False
        if not self._held and not self.inner.is_closing():
            self.inner.resume_reading()

    def hold(self) -> None:
        """Stop reading until :meth:`release`, whatever flow control does meanwhile."""
        if not self._held:
            self._held = True
            if not self._paused and not self.inner.is_closing():
                self.inner.pause_reading()

    def release(self) -> None:
        """Undo :meth:`hold`."""
        if self._held:
            self._held = False
            if not self._paused and not self.inner.is_closing():
                self.inner.resume_reading()

    def _flush(self) -> None:
        parts, self._parts, self._gathered = self._parts, [], 0
        if parts and not self.inner.is_closing():
            self.inner.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
