"""Compares the digests of images with their pixels, in threads: a large image takes longer than a step may wait.

A message waits here until its images are read. Messages of the same id that come in the meantime, such as its abort, wait behind
it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from engine import wire

INLINE_BYTES = 1 << 20
"""Pixels that are read at once, in about a millisecond."""
THREADS = 2

Message = wire.Score | wire.ScoreItems | wire.Generate


class _Received(NamedTuple):
    message: wire.Request
    time: float | None


class DigestChecks:
    """Messages on their way to the loop. One thread calls it."""

    def __init__(self, submit: Callable[[wire.Request, float | None], None], refuse: Callable[[str, str], None]) -> None:
        """submit: takes messages whose images are right, and when they were received; refuse: takes the id of another one, and the
        problem."""
        self._submit = submit
        self._refuse = refuse
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: dict[str, tuple[list[_Received], Future[str | None]]] = {}

    @property
    def busy(self) -> bool:
        """Whether a message waits."""
        return bool(self._waiting)

    def add(self, message: wire.Request, received: float | None = None) -> None:
        """Hand ``message`` on, at once or when its images are read. ``received``: see :meth:`engine.loop.Loop.submit`."""
        if message.id in self._waiting:
            self._waiting[message.id][0].append(_Received(message, received))
        elif isinstance(message, wire.Abort) or not message.images:
            self._submit(message, received)
        elif sum(len(image.pixels) for image in message.images) <= INLINE_BYTES:
            self._hand_on(_Received(message, received), problem(message.images))
        else:
            self._threads = self._threads or ThreadPoolExecutor(THREADS, "digests")
            self._waiting[message.id] = [_Received(message, received)], self._threads.submit(problem, message.images)

    def settle(self) -> None:
        """Hand on the messages whose images have been read."""
        for request_id in [each for each, (_, read) in self._waiting.items() if read.done()]:
            (first, *others), read = self._waiting.pop(request_id)
            self._hand_on(first, read.result())
            for message, received in others:
                self.add(message, received)

    def _hand_on(self, read: _Received, found: str | None) -> None:
        if found is None:
            self._submit(*read)
        else:
            self._refuse(read.message.id, found)


def problem(images: list[wire.Image]) -> str | None:
    """Return the problem with the digests of ``images``, as a sentence; None if there is none."""
    for place, image in enumerate(images):
        sides = image.rows, image.columns
        if not all(0 <= side < 1 << 32 for side in sides) or image.digest != wire.image_digest(*sides, image.pixels):
            return f"The digest of image {place} is not that of its pixels."
    return None
