"""The loop process: sockets around :class:`engine.loop.Loop`. :mod:`engine.serving.loop_client` starts it.

Arguments: the settings as JSON, the address to receive requests from, the address to send events to. The process exits when its
standard input closes, so that it cannot outlive the server that started it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.models.errors import ModelError
from engine.models.source import located
from engine.models.tokenizer_files import tokenizer_files
from engine.serving import channel, logs
from engine.serving.adapter_thread import AdapterThread, start_adapters
from engine.serving.digests import DigestChecks
from engine.serving.heap import Heap
from engine.settings import EngineSettings

COLLECT_WHEN_IDLE, COLLECT_UNDER_LOAD = 100, 1000
"""Steps since the last collection."""
WAIT_MILLISECONDS = 1
"""Pause of a loop that has nothing to do until the images of a message are read."""


def main(settings_json: str, requests_address: str, events_address: str) -> int:
    """Serve until the parent is gone; returns the exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends this process
    settings = msgspec.json.decode(settings_json, type=EngineSettings)
    with zmq.Context() as context, context.socket(zmq.PULL) as requests, context.socket(zmq.PUSH) as events:
        requests.connect(requests_address)
        events.connect(events_address)
        try:
            settings = located(settings)
            loop = build_loop(settings)
            if loop.structured is not None:
                loop.structured.start()
            files = tokenizer_files(Path(settings.model))
            adapters = start_adapters(loop.adapters, settings, context, events_address)
            ready = channel.Ready(loop.info, files, loop.stats, loop.adapters.description)
        except ModelError as error:
            events.send(wire.encode(channel.StartFailed(str(error))))
            return 1
        events.send(wire.encode(ready))
        _serve(loop, requests, events, adapters)
    return 0


def _serve(loop: Loop, requests: zmq.Socket[bytes], events: zmq.Socket[bytes], adapters: AdapterThread | None = None) -> None:
    inbox = Inbox(loop, adapters)
    garbage = GarbageCollection()
    heap = Heap()
    while True:
        if loop.idle and not inbox.busy:
            garbage.collect_after(COLLECT_WHEN_IDLE)
            while not requests.poll(round(1000 * channel.BEAT_SECONDS)):
                events.send(wire.encode(channel.StepDone([], loop.stats)))
                heap.trim()
            inbox.submit(*channel.unstamped(requests.recv_multipart()))
        while requests.poll(WAIT_MILLISECONDS if loop.idle and inbox.busy else 0):
            inbox.submit(*channel.unstamped(requests.recv_multipart()))
        inbox.settle()
        replies = loop.step()
        events.send(wire.encode(channel.StepDone(replies, loop.stats)))
        garbage.steps += 1
        garbage.collect_after(COLLECT_UNDER_LOAD)


class Inbox:
    """Decodes messages for the loop. The server has read their headers only, so a body may be faulty."""

    def __init__(self, loop: Loop, adapters: AdapterThread | None = None) -> None:
        """``adapters``: None if the engine takes no adapters through HTTP."""
        self._loop = loop
        self._adapters = adapters
        self._messages = msgspec.msgpack.Decoder(wire.Request | channel.AdapterCommand)
        self._headers = msgspec.msgpack.Decoder(channel.Header)
        self._digests = DigestChecks(loop.submit, loop.refuse)

    @property
    def busy(self) -> bool:
        """Whether a message is held until its images are read."""
        return self._digests.busy

    def settle(self) -> None:
        """Hand the loop the messages whose images have been read."""
        self._digests.settle()

    def submit(self, body: bytes, received: float | None) -> None:
        """Hand a message to the loop, or a refusal that names what is wrong with the body. ``received``: see
        :meth:`Loop.submit`."""
        try:
            message = self._messages.decode(body)
        except msgspec.DecodeError as error:
            header = self._headers.decode(body)
            kind = type(header).__name__.removesuffix("Header")
            self._loop.refuse(header.id, f"The body is not a {kind} message: {error}.")
        else:
            if not isinstance(message, channel.AdapterCommand):
                self._digests.add(message, received)
            elif self._adapters is not None:
                self._adapters.submit(message)


class GarbageCollection:
    """Keeps Python's garbage collector off the hot path.

    Objects that exist at the start are never examined again. The others are collected when the loop has nothing to do or, under
    lasting load, after many steps. The loop's own objects form cycles (a request and its branches refer to each other), so the
    collector cannot stay off.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self.steps = 0
        """Steps since the last collection."""

    def collect_after(self, steps: int) -> None:
        """Collect if there were at least ``steps`` steps since the last collection."""
        if self.steps >= steps:
            gc.collect()
            self.steps = 0


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # unbuffered: sys.stdin's lock would block the interpreter's exit
    os._exit(0)


if __name__ == "__main__":
    logs.start()
    sys.exit(main(*sys.argv[1:]))
