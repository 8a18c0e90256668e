"""The loop process's thread for adapters, with a socket of its own: sockets are not shared between threads."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import zmq

from engine import wire
from engine.lora.manager import LoraManager
from engine.lora.registry import AdapterRegistry
from engine.serving import channel
from engine.settings import EngineSettings


class AdapterThread:
    """Passes commands to the thread and its answers to the server."""

    def __init__(self, registry: AdapterRegistry, settings: EngineSettings, events: zmq.Socket[bytes]) -> None:
        self._events = events
        self._lock = threading.Lock()
        """A full queue is answered by the loop's thread."""
        self.manager = LoraManager(
            registry,
            lambda adapters: self._send(channel.AdaptersChanged(adapters)),
            root=None if settings.lora_root is None else Path(settings.lora_root),
            watched=None if settings.lora_directory is None else Path(settings.lora_directory),
        )

    def submit(self, message: channel.AdapterCommand) -> None:
        """Queue a command of the server."""
        self.manager.submit(message.command, partial(self._answer, message.id))

    def _answer(self, command_id: str, result: wire.Adapter | wire.Failed | None) -> None:
        self._send(channel.AdapterDone(command_id, result))

    def _send(self, event: channel.Event) -> None:
        with self._lock:
            self._events.send(wire.encode(event))


def start_adapters(
    registry: AdapterRegistry, settings: EngineSettings, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> AdapterThread:
    """Load the watched adapters and start the thread. ``address``: of the server's events."""
    events = context.socket(zmq.PUSH)
    events.set(zmq.LINGER, 0)
    events.connect(address)
    thread = AdapterThread(registry, settings, events)
    thread.manager.start()
    return thread
