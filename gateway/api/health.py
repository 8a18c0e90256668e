"""``GET /livez``, ``/readyz`` and ``/metrics``; ``/health``, ``/ping`` and ``/version``, which clients of vLLM ask for, and
``/v1/cluster/auth``, for which that of Xinference asks."""

from __future__ import annotations

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.types import Scope
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics

from yardstick_llm.gateway.errors import GatewayError, NotReady
from yardstick_llm.gateway.http.auth import KeyRing, key_of
from yardstick_llm.gateway.http.connection import Incoming
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.process.signals import Lifecycle
from yardstick_llm.tracing.version import project_version


class Version(msgspec.Struct, frozen=True):
    """The version of the server."""

    version: str


class ClusterAuth(msgspec.Struct, frozen=True):
    """Whether requests need a key."""

    auth: bool


def health_routes(
    pool: Pool, keys: KeyRing | None, telemetry: Telemetry, lifecycle: Lifecycle, *, metrics_names: bool
) -> list[HTTPRouteHandler]:
    """Create the routes, which need no key. ``keys`` is None if no route needs a key. ``metrics_names``: see
    :class:`gateway.settings.Settings`."""

    number = project_version()

    def check_ready() -> None:
        if lifecycle.draining:
            raise NotReady("This gateway is shutting down; send the request to another one.", retry_after=1)
        if keys is not None:
            keys.check_usable()
        pool.check_ready()

    def may_see_names(scope: Scope) -> bool:
        if keys is None or metrics_names:
            return True
        try:
            return key_of(keys, scope).admin
        except GatewayError:
            return False

    @get("/livez", media_type="text/plain", tags=["operation"])
    async def livez() -> str:
        """Tell whether the process runs."""
        return "ok"

    @get("/readyz", media_type="text/plain", tags=["operation"])
    async def readyz() -> str:
        """Tell whether this gateway answers requests: once it knows a model, and until it shuts down."""
        check_ready()
        return "ok"

    @get(["/health", "/ping"], media_type="text/plain", tags=["operation"])
    async def health() -> str:
        """Tell the same as `/readyz`, with an empty body."""
        check_ready()
        return ""

    @get("/version", tags=["operation"])
    async def show_version() -> Version:
        """Report the version of the server."""
        return Version(version=number)

    @get("/metrics", media_type="text/plain", tags=["operation"])
    async def metrics(request: AnyRequest) -> Response[bytes]:
        """Report the metrics in Prometheus's text format, or as OpenMetrics, which has exemplars, if `Accept` asks for it. Metrics
        that name API keys or engines need a key with `admin`, unless a setting shows them to everybody."""
        open_metrics = b"application/openmetrics-text" in Incoming.of(request.scope).headers.get(b"accept", b"")
        time_slice = TimeSlice()
        parts: list[bytes] = []
        for part in telemetry.exposition(open_metrics=open_metrics, names=may_see_names(request.scope)):
            parts.append(part)
            if time_slice.over:
                await time_slice.yield_to_loop()
        kind = openmetrics.CONTENT_TYPE_LATEST if open_metrics else CONTENT_TYPE_LATEST
        return Response(b"".join(parts), media_type=kind.removesuffix("; charset=utf-8"))

    @get("/v1/cluster/auth", tags=["operation"])
    async def cluster_auth() -> ClusterAuth:
        """Tell whether requests need a key; the client of Xinference asks before it sends one."""
        return ClusterAuth(auth=keys is not None)

    return [livez, readyz, health, show_version, metrics, cluster_auth]
