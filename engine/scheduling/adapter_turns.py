"""Which adapters a step may have, where requests name more than the device has slots for.

Up to this number nothing is restricted. Beyond it, adapters take turns of :data:`TURN` steps, in the order in which their last turn
ended, so each adapter with a request is served after a bounded number of steps, and a swap pays for several steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.requests.core import Request

TURN = 8
"""Steps after which an adapter leaves its place to one that waits."""
REMEMBERED = 4096
"""Adapters whose last turn is remembered."""


class AdapterTurns:
    """Chooses the adapters of each step."""

    def __init__(self, most: int = 0) -> None:
        """``most``: adapters of a step; 0: requests have none."""
        self._most = most
        self._step: dict[str, None] = {}
        """Adapters of this step."""
        self._since: dict[str, int] = {}
        """Adapters in turn, and the step in which their turn began."""
        self._ended: dict[str, int] = {}
        """Number of the end of an adapter's last turn, among all ends."""
        self._ends = 0
        self._closed = False
        self._number = 0

    def begin(self, requests: Iterable[Request]) -> None:
        """Begin a step. ``requests``: running ones, and the first waiting one of each tenant."""
        if not self._most:
            return
        self._number += 1
        wanted = dict.fromkeys(request.adapter.digest for request in requests if request.adapter is not None)
        self._closed = len(wanted) > self._most
        if not self._closed:
            self._step.clear()
            self._since = {digest: self._since.get(digest, self._number) for digest in wanted}
            return
        self._rotate(wanted)
        self._step = dict.fromkeys(self._since)

    def takes(self, request: Request) -> bool:
        """Whether this step may compute a part of ``request``."""
        if request.adapter is None or request.adapter.digest in self._step:
            return True
        if self._closed or len(self._step) >= self._most:
            return False
        self._step[request.adapter.digest] = None
        return True

    def _rotate(self, wanted: dict[str, None]) -> None:
        """End the turns of adapters without requests, then turns that are over, and give their places to waiting adapters."""
        for digest in [digest for digest in self._since if digest not in wanted]:
            self._end(digest)
        waiting = sorted((digest for digest in wanted if digest not in self._since), key=lambda digest: self._ended.get(digest, 0))
        over = sorted(
            (digest for digest, begun in self._since.items() if self._number - begun >= TURN), key=self._since.__getitem__
        )
        for digest in over[: max(0, len(waiting) - (self._most - len(self._since)))]:
            self._end(digest)
        for digest in waiting[: self._most - len(self._since)]:
            self._since[digest] = self._number

    def _end(self, digest: str) -> None:
        del self._since[digest]
        self._ended.pop(digest, None)
        self._ends += 1
        self._ended[digest] = self._ends
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
