"""How long a new request would wait: what stands before it, at the pace at which the queue has been moving.

The pace is what was begun, in tokens a second, in those steps that somebody had to wait through: only then is the engine as fast as
it can be, whatever holds it up. The last ten seconds of that count most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from engine.core import Request

HALF_LIFE = 10.0
"""Seconds of waiting after which what was seen counts for half."""


class Backlog:
    """The requests that nobody has begun."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, monotonic."""
        self._clock = clock
        self._sizes: dict[str, tuple[int, int]] = {}
        """Priority and tokens, by id."""
        self._tokens: Counter[int] = Counter()
        """Their sum, by priority."""
        self._turned: float | None = None
        """When the last step was scheduled, if that left somebody waiting."""
        self._begun = 0
        """Tokens since."""
        self._moved, self._seconds = 0.0, 0.0

    def enter(self, request: Request) -> None:
        """It begins to wait."""
        tokens = len(request.prefix) + sum(len(branch.tokens) for branch in request.branches)
        self._sizes[request.id] = request.priority, tokens
        self._tokens[request.priority] += tokens

    def leave(self, request: Request, *, begun: bool) -> None:
        """It waits no longer, if it did."""
        priority, tokens = self._sizes.pop(request.id, (0, 0))
        self._tokens[priority] -= tokens
        if not self._tokens[priority]:
            del self._tokens[priority]
        self._begun += tokens if begun else 0

    def turn(self) -> None:
        """A step has been scheduled."""
        now = self._clock()
        if self._turned is not None:
            kept = 0.5 ** ((now - self._turned) / HALF_LIFE)
            self._moved = kept * self._moved + self._begun
            self._seconds = kept * self._seconds + now - self._turned
        self._turned = now if self._sizes else None
        self._begun = 0

    def seconds(self, priority: int) -> float:
        """How long a request of this priority would probably wait. Where nothing has moved yet: as long as others have."""
        ahead = sum(tokens for other, tokens in self._tokens.items() if other <= priority)
        if not ahead:
            return 0.0
        return ahead * self._seconds / self._moved if self._moved else self._seconds
