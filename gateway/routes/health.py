"""``GET /livez``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.errors import NotReady
from gateway.lifecycle import Lifecycle
from gateway.pool.pool import Pool
from gateway.telemetry import Telemetry


def health_routes(pool: Pool, telemetry: Telemetry, lifecycle: Lifecycle) -> list[HTTPRouteHandler]:
    """The endpoints; they need no key."""

    @get("/livez", media_type="text/plain", tags=["operation"])
    async def livez() -> str:
        """Tell whether the process runs."""
        return "ok"

    @get("/readyz", media_type="text/plain", tags=["operation"])
    async def readyz() -> str:
        """Tell whether any model can be asked here."""
        if lifecycle.draining:
            raise NotReady("This gateway is shutting down; ask another one.", retry_after=1)
        pool.check_ready()
        return "ok"

    @get("/metrics", media_type="text/plain", tags=["operation"])
    async def metrics() -> Response[bytes]:
        """Report the metrics in Prometheus's text format."""
        return Response(telemetry.exposition(), media_type=CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8"))

    return [livez, readyz, metrics]
