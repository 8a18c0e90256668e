"""Room for the images of requests in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import BodyTooLarge, Overloaded
from gateway.http.context import RequestContext
from gateway.ops.metrics import ImageMetrics
from gateway.process.fair_room import FairRoom, Tenant

Take = Callable[[int], None]
"""Takes room for more bytes, by their number. Raises :class:`Overloaded`, :class:`BodyTooLarge`."""


class ImageRoom:
    """Bounds the bytes of images that the gateway holds, fairly between keys: files that are fetched for a small request, and
    pixels, which a small file may have many of and which stay until the request ends, because another engine may need them."""

    def __init__(self, capacity: int, metrics: ImageMetrics) -> None:
        """``capacity``: in bytes."""
        self._room = FairRoom(capacity)
        self._metrics = metrics
        metrics.held.set_function(lambda: self._room.used)

    def hold(self, context: RequestContext, amount: int) -> None:
        """Take room for ``amount`` bytes until the end of the request. Raises :class:`Overloaded`, :class:`BodyTooLarge`."""
        if amount:
            tenant = context.tenant
            self._take(tenant, amount, amount)
            context.at_end.append(lambda: self._room.give(tenant.id, amount))

    @contextmanager
    def receiving(self, tenant: Tenant) -> Iterator[Take]:
        """Room for files that are received and used within the block."""
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            self._take(tenant, amount, held + amount)
            held += amount

        try:
            yield take
        finally:
            if held:
                self._room.give(tenant.id, held)

    def _take(self, tenant: Tenant, amount: int, whole: int) -> None:
        """``whole``: what the request holds with ``amount``."""
        if not self._room.take(tenant.id, amount, tenant.weight):
            self._metrics.refused.labels("room").inc()
            most = self._room.most(tenant.id, tenant.weight)
            if whole > most:
                raise BodyTooLarge(f"The request's images have more than the {most} bytes that one caller may have in progress.")
            raise Overloaded("The server holds too many images at the moment; try again soon.", retry_after=1)
