"""Addresses of the server's sockets for the loop process, without a file that outlives a server that is killed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq


class Addresses:
    """Unix sockets that are bound in a folder which Linux needs for that moment only.

    The loop process connects through descriptors of the sockets' files, so their paths can be removed before it starts, and no
    other process can connect. Other systems have no such descriptors and keep the folder until :meth:`close`.
    """

    def __init__(self, sockets: Sequence[zmq.Socket[Any]]) -> None:
        """Bind ``sockets``. Raises OSError where there is no room for the folder, and ZMQError where its path is too long."""
        self.descriptors: list[int] = []
        """To pass to the loop process under the same numbers."""
        self.names: list[str] = []
        """Addresses to connect to, in the order of the sockets."""
        self._folder = tempfile.TemporaryDirectory(prefix="yardstick-", ignore_cleanup_errors=True)
        try:
            for number, socket in enumerate(sockets):
                self.names.append(self._bind(socket, Path(self._folder.name) / str(number)))
        except Exception:
            self.close()
            raise
        if sys.platform == "linux":
            self._folder.cleanup()

    def _bind(self, socket: zmq.Socket[Any], path: Path) -> str:
        """Return the address to connect to."""
        socket.bind(f"ipc://{path}")
        if sys.platform != "linux":
            return f"ipc://{path}"
        self.descriptors.append(os.open(path, os.O_PATH))
        return f"ipc:///proc/self/fd/{self.descriptors[-1]}"

    def release(self) -> None:
        """Close the descriptors; the loop process has its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        """Remove what is left."""
        self.release()
        self._folder.cleanup()
