"""A transport that coalesces writes, and whose reading can be paused for two independent reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

GATHER_BYTES = 64 * 1024


class GatheringTransport:
    """Joins all writes of one event loop iteration into one; the extra system call dominates small responses."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_close: Callable[[], None]) -> None:
        """``on_close`` is called instead of closing ``transport``, after all earlier writes have been passed on."""
        self.inner = transport
        self._loop = loop
        self._on_close = on_close
        self._parts: list[bytes] = []
        self.gathered = 0
        """Bytes that wait to be passed on."""
        self._held = False
        self._paused = False

    def write(self, data: bytes) -> None:
        """Pass ``data`` on at the next event loop iteration, or at once if much has been gathered."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self.gathered += len(data)
        if self.gathered > GATHER_BYTES:  # lets the transport apply backpressure within this iteration
            self._flush()

    def close(self) -> None:
        """Pass all earlier writes on, then call ``on_close``."""
        self._flush()
        self._on_close()

    def pause_reading(self) -> None:
        """Pause reading on behalf of flow control."""
        self._paused = True
        if not self._held and not self.inner.is_closing():
            self.inner.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading on behalf of flow control; :meth:`hold` still keeps it paused."""
        self._paused = False
        if not self._held and not self.inner.is_closing():
            self.inner.resume_reading()

    def hold(self) -> None:
        """Pause reading until :meth:`release`, independently of flow control."""
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
        parts, self._parts, self.gathered = self._parts, [], 0
        if parts and not self.inner.is_closing():
            self.inner.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
