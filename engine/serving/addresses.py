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
        """Bind ``sockets``."""
        self.descriptors: list[int] = []
        """To pass to the loop process under the same numbers."""
        self.names: list[str] = []
        """Addresses to connect to, in the order of the sockets."""
        self._folder = tempfile.TemporaryDirectory(prefix="yardstick-", ignore_cleanup_errors=True)
        for number, socket in enumerate(sockets):
            path = Path(self._folder.name) / str(number)
            socket.bind(f"ipc://{path}")
            if sys.platform == "linux":
                self.descriptors.append(os.open(path, os.O_PATH))
                path = Path(f"/proc/self/fd/{self.descriptors[-1]}")
            self.names.append(f"ipc://{path}")
        if sys.platform == "linux":
            self._folder.cleanup()

    def release(self) -> None:
        """Close the descriptors; the loop process has its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        """Remove what is left."""
        self.release()
        self._folder.cleanup()
