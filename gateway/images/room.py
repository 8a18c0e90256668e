"""Room for the pixels of requests in progress."""

from __future__ import annotations

from gateway.context import RequestContext
from gateway.errors import Overloaded
from gateway.process.fair_room import FairRoom


class ImageRoom:
    """Bounds the bytes of images that the gateway holds, fairly between keys: a small file may have many pixels, and they stay
    until the request ends, because another engine may need them."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: in bytes."""
        self._room = FairRoom(capacity)

    def hold(self, context: RequestContext, amount: int) -> None:
        """Take room for ``amount`` bytes until the end of the request. Raises :class:`Overloaded`."""
        if not amount:
            return
        tenant, weight = (None, 1.0) if context.key is None else (context.key.id, context.key.weight)
        if not self._room.take(tenant, amount, weight):
            raise Overloaded("The server holds too many images at the moment; try again soon.", retry_after=1)
        context.at_end.append(lambda: self._room.give(tenant, amount))
