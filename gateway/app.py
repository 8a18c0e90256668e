"""The composition root: creates the application from the settings, and answers errors that leave a handler."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from litestar import Litestar, Request, Response, Router
from litestar.exceptions import HTTPException, ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.types import HTTPScope

from yardstick_llm.gateway.api.access import Quotas
from yardstick_llm.gateway.api.adapters import adapter_routes
from yardstick_llm.gateway.api.catalogue_scores import Scanner
from yardstick_llm.gateway.api.catalogues import Catalogues, catalogue_routes, catalogue_space
from yardstick_llm.gateway.api.chat import chat_route
from yardstick_llm.gateway.api.completions import completion_route
from yardstick_llm.gateway.api.console import console_routes
from yardstick_llm.gateway.api.generation import Generator
from yardstick_llm.gateway.api.health import health_routes
from yardstick_llm.gateway.api.models import model_routes, tokenize_routes
from yardstick_llm.gateway.api.openapi import KEY, NO_KEY, DocumentedStructs, asset_route, openapi_config
from yardstick_llm.gateway.api.reader import Reader
from yardstick_llm.gateway.api.rerank import rerank_route
from yardstick_llm.gateway.api.responses import Kept, Responder, response_routes, response_space
from yardstick_llm.gateway.api.score import score_route
from yardstick_llm.gateway.api.scoring import Scoring
from yardstick_llm.gateway.api.tei import tei_routes
from yardstick_llm.gateway.api.texts import classify_route, embeddings_routes, length_route
from yardstick_llm.gateway.errors import GatewayError, from_status
from yardstick_llm.gateway.http.auth import KeyRing, RequireKey
from yardstick_llm.gateway.http.body import InFlightLimit
from yardstick_llm.gateway.http.connection import BoundedConnection, Connections
from yardstick_llm.gateway.http.context import RequestContext, answer_request, send_error
from yardstick_llm.gateway.http.origins import LocalGuard, Origins
from yardstick_llm.gateway.images.fetch import ImageFetcher, ImageRoom
from yardstick_llm.gateway.limits.limiter import Limiter, LocalLimiter, SharedLimiter
from yardstick_llm.gateway.ops.access_log import AccessLog, LineWriter
from yardstick_llm.gateway.ops.metrics import Telemetry, dropped_lines, dropped_spans
from yardstick_llm.gateway.ops.tracing import Tracer
from yardstick_llm.gateway.pool.client import EngineClient, EngineToken
from yardstick_llm.gateway.pool.discovery import discover
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.fanout import FanOut
from yardstick_llm.gateway.pool.loading import AdapterManager
from yardstick_llm.gateway.pool.pool import Names, Pool
from yardstick_llm.gateway.pool.replica import Health, Replica
from yardstick_llm.gateway.process.event_loop import Watchdog
from yardstick_llm.gateway.process.signals import Lifecycle
from yardstick_llm.gateway.scoring.scorer import Scorer
from yardstick_llm.gateway.settings import Settings, SettingsError
from yardstick_llm.gateway.store.base import Store
from yardstick_llm.gateway.store.link import Link, open_client
from yardstick_llm.gateway.store.memory import MemoryStore
from yardstick_llm.gateway.store.redis import RedisStore
from yardstick_llm.gateway.text.prepared import Bounds
from yardstick_llm.gateway.workers.queue import Capacity
from yardstick_llm.gateway.workers.workers import Workers, default_workers
from yardstick_llm.tracing.export import Exporter, TracingError
from yardstick_llm.tracing.sampling import sampler_of
from yardstick_llm.tracing.setup import open_exporter

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
"""Longest wait for a connection to an engine."""
RESOLVE_SECONDS = 5.0
"""Interval between two lookups of the names in ``dns://`` entries."""
SILENCE_SECONDS = 2.0
"""Time for which an engine may leave a probe unanswered before it counts as silent. The requests of a silent engine go to other
engines, and it gets no new ones until it answers. With ``probe_seconds`` this bounds the gap in a stream whose engine stops.
Time in which the gateway itself is blocked does not count."""
STARTUP_SECONDS = 60.0
"""Time after the start in which a request for an unknown model is answered 503 and not 404 while some entry of ``engines`` has not
led to a model yet. A loading engine names its model; requests for that model are answered 503 in any case."""


def _pool(settings: Settings, telemetry: Telemetry, workers: Workers) -> Pool:
    """Create the pool of engines, which connects to nothing yet. Raises :class:`SettingsError` if the engine token is missing."""
    try:
        token = EngineToken(settings.engine_token_file) if settings.engine_token_file else None
    except (OSError, ValueError) as error:
        raise SettingsError(f"YARDSTICK_ENGINE_TOKEN_FILE: {error}") from None

    def connect(url: str, entry: str) -> Replica:
        client = EngineClient(url, connect_seconds=CONNECT_SECONDS, engine_seconds=settings.engine_seconds, token=token)
        return Replica(client, entry, Health())

    return Pool(
        {entry: discover(entry, resolve_seconds=RESOLVE_SECONDS) for entry in settings.engines},
        connect,
        telemetry,
        workers,
        probe_seconds=settings.probe_seconds,
        silence_seconds=SILENCE_SECONDS,
        startup_seconds=STARTUP_SECONDS,
        presets=settings.chosen_presets,
        names=Names(settings.chosen_aliases, settings.chosen_fallbacks),
    )


START_SECONDS = 1.0
"""Time after the start from which the watchdog measures delays of the event loop."""
CACHED_BYTES = 250
"""Least size of a result in the in-memory cache."""
CACHE_TTL_SECONDS = 86_400.0
"""Time for which Redis keeps a result, varied by up to a tenth."""
KEYS_STALE_SECONDS = 300.0
"""Time for which the keys of the last valid version stay valid while their file cannot be read or is not valid; after that,
requests that need a key are answered 503. A file that is deleted or empty revokes all keys within three seconds."""
KEEPALIVE_SECONDS = 15.0
"""Time without an event after which a stream gets a comment, so that proxies do not close it (many do after 60 s). A stream begins
with status 200 if its first event takes longer than this; an error before that has its own status."""
TEXT_JOB_MIB = 512
"""Most memory for reading one request, in MiB, before the answer is 400."""
IMAGE_SECONDS = 5.0
"""Longest time of fetching an image, before the answer is 400."""
IMAGE_BYTES = 10 << 20
"""Most bytes of an image that is fetched."""


def create_app(
    settings: Settings,
    *,
    lifecycle: Lifecycle | None = None,
    log: LineWriter | None = None,
) -> Gateway:
    """Create the gateway. ``log`` None: no access log. Raises :class:`SettingsError` for an invalid key file or a missing engine
    token."""
    lifecycle = lifecycle or Lifecycle()
    telemetry = Telemetry(usage_keys=settings.usage_keys)
    text_workers = settings.text_workers or default_workers()
    workers = Workers(Capacity(text_workers, TEXT_JOB_MIB, settings.max_waiting, settings.text_queue_bytes), telemetry)
    stores = Stores.opened(settings, telemetry)
    pool = _pool(settings, telemetry, workers)
    adapters = AdapterManager(pool, stores.store, telemetry, interval=settings.probe_seconds)
    keys = _key_ring(settings)
    origins = Origins(settings.cors_origins)
    access_log = _access_log(settings, log, telemetry)
    exporter = _exporter(settings, telemetry)
    watchdog = Watchdog(telemetry)

    @asynccontextmanager
    async def running(_: Litestar) -> AsyncIterator[None]:
        """Run the parts with work in the background. What requests use stops after what sends requests."""
        watchdog.start(after=START_SECONDS)
        workers.start()
        pool.start()
        adapters.start()
        if exporter:
            exporter.start()
        if keys:
            keys.start(telemetry)
        for task in reversed(stores.tasks):
            task.start()
        try:
            yield
        finally:
            if keys:
                keys.stop()
            await adapters.stop()
            await pool.stop()
            await workers.stop()
            watchdog.stop()
            for task in stores.tasks:
                await task.stop()
            if exporter:
                await asyncio.to_thread(exporter.close)

    quotas = Quotas(stores.limiter, telemetry)
    v1 = Router(
        path="",
        route_handlers=_v1(settings, telemetry, workers, stores, pool, adapters, quotas),
        middleware=[*([RequireKey(keys)] if keys else []), InFlightLimit(settings, telemetry, quotas.charge_refusal)],
        security=KEY if keys else NO_KEY,
    )
    return Gateway(
        telemetry,
        lifecycle,
        log=access_log,
        tracer=Tracer(sampler_of(os.environ), exporter) if exporter else None,
        protocol=partial(BoundedConnection, Connections(settings, telemetry, access_log)),
        check=origins.refusal if keys else LocalGuard(settings.allowed_hosts, origins, telemetry).refusal,
        route_handlers=[
            v1,
            *health_routes(pool, keys, telemetry, lifecycle, metrics_names=settings.metrics_names),
            asset_route(),
            *(console_routes() if settings.console else []),
        ],
        lifespan=[running],
        request_max_body_size=settings.max_body_bytes,
        exception_handlers={GatewayError: _answer_error, HTTPException: _answer_refusal, Exception: _answer_fault},
        cors_config=origins.config(),
        openapi_config=openapi_config(),
        plugins=[DocumentedStructs()],
        logging_config=None,
    )


def _key_ring(settings: Settings) -> KeyRing | None:
    """Return the keys of the settings; None if requests need none. Raises :class:`SettingsError`."""
    if settings.api_keys_file is None:
        return None
    secret = None
    if settings.api_keys_secret is not None:
        from yardstick_llm.gateway.process.kubernetes import WatchedSecret  # importing the package takes half a second

        secret = WatchedSecret(settings.api_keys_secret, "keys.json")
    return KeyRing(settings.api_keys_file, stale_seconds=KEYS_STALE_SECONDS, isolation=settings.cache_isolation, secret=secret)


def _v1(
    settings: Settings,
    telemetry: Telemetry,
    workers: Workers,
    stores: Stores,
    pool: Pool,
    adapters: AdapterManager,
    quotas: Quotas,
) -> list[HTTPRouteHandler]:
    """Create the endpoints that need an API key, on a server with keys."""
    reader = Reader(
        workers,
        text_bounds(settings),
        telemetry,
        text_seconds=settings.text_seconds,
        job_mib=TEXT_JOB_MIB,
        fetcher=ImageFetcher(
            settings.image_hosts,
            telemetry.images,
            seconds=IMAGE_SECONDS,
            most_bytes=IMAGE_BYTES,
            most_request_bytes=settings.max_body_bytes,
        ),
        image_room=ImageRoom(settings.max_bytes_in_flight, telemetry.images),
        quotas=quotas,
        formats=settings.chosen_formats,
    )
    dispatcher = Dispatcher(
        telemetry, wait_seconds=settings.wait_seconds, max_waiting=settings.max_waiting, hedge_budget=settings.hedge_budget
    )
    fan_out = FanOut(dispatcher, telemetry, split_tokens=settings.split_tokens, idle_split_tokens=settings.idle_split_tokens)
    scoring = Scoring(Scorer(stores.store, fan_out, telemetry), quotas, telemetry, KEEPALIVE_SECONDS)
    generator = Generator(dispatcher, quotas, telemetry, KEEPALIVE_SECONDS)
    catalogues = Catalogues(stores.store, catalogue_space(settings), telemetry)
    telemetry.catalogues.watch(lambda: stores.store.totals(catalogues.space.name))
    scanner = Scanner(catalogues, pool, reader.bounds, scoring)
    responses = Kept(stores.store, response_space(settings), telemetry, settings.stored_response_bytes)
    return [
        score_route(pool, reader, scoring, scanner),
        rerank_route(pool, reader, scoring, scanner),
        *catalogue_routes(pool, reader, catalogues, quotas),
        classify_route(pool, reader, scoring),
        *embeddings_routes(pool, reader, scoring),
        *tei_routes(pool, reader, scoring),
        completion_route(pool, reader, generator),
        chat_route(pool, reader, generator),
        *response_routes(pool, reader, Responder(generator, responses)),
        length_route(pool, reader, scoring),
        *model_routes(pool),
        *tokenize_routes(pool, reader, quotas, workers),
        *adapter_routes(pool, adapters, quotas),
    ]


class Gateway(Litestar):
    """The ASGI application. Every request gets a :class:`RequestContext`, including one that matches no route."""

    def __init__(
        self,
        telemetry: Telemetry,
        lifecycle: Lifecycle,
        *,
        log: AccessLog | None,
        tracer: Tracer | None,
        protocol: Callable[..., asyncio.Protocol],
        check: Callable[[HTTPScope], GatewayError | None],
        **options: Any,
    ) -> None:
        """``protocol``: protocol factory for ``uvicorn.Config(http=…)``. ``check``: returns the error for a request that is
        refused. ``log`` and ``tracer``: None means that requests are not logged, and not traced."""
        super().__init__(**options)
        self.protocol = protocol
        self.telemetry = telemetry
        self._lifecycle = lifecycle
        self._log = log
        self._tracer = tracer
        self._check = check

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one ASGI scope."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        refusal = self._check(scope)
        app = super().__call__ if refusal is None else lambda _, __, send: send_error(refusal, send)
        if scope["method"] == "HEAD":  # the server omits the body, because its own copy of the scope says HEAD
            scope = scope | {"method": "GET"}
        await answer_request(app, self.telemetry, self._lifecycle, self._log, self._tracer, scope, receive, send)


def _answer_error(request: Request[Any, Any, Any], error: GatewayError) -> Response[Any]:
    """Answer a request that failed with an error of ours."""
    RequestContext.of(request).failed(error)
    return Response(error.body, status_code=error.status, headers=error.headers)


def _answer_refusal(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """Convert the framework's own errors. It refuses only empty bodies; ``gateway/api/reader.py`` handles all others."""
    detail = "The request body is empty; send a JSON object." if isinstance(error, ValidationException) else error.detail
    if error.status_code >= 500:
        return _answer_fault(request, error)
    answer = _answer_error(request, from_status(error.status_code, detail))
    answer.headers |= error.headers or {}
    return answer


def _answer_fault(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Answer a request that failed with any other error, which is logged and not shown."""
    logger.error("request %s failed", RequestContext.of(request).id.decode(), exc_info=error)
    return _answer_error(request, from_status(500, ""))


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores of a gateway: in Redis, which all gateways share, or in its own memory."""

    limiter: Limiter
    store: Store
    tasks: tuple[RedisStore | SharedLimiter | Link, ...] = ()
    """Those that run in the background, in the order in which they stop; none if all is in memory."""

    @classmethod
    def opened(cls, settings: Settings, telemetry: Telemetry) -> Self:
        """Create all in Redis if the settings name a server, otherwise in memory. Connects to nothing."""
        limiter: Limiter = LocalLimiter()
        store: Store = MemoryStore(settings.cache_bytes // CACHED_BYTES, settings.cache_bytes)
        tasks: tuple[RedisStore | SharedLimiter | Link, ...] = ()
        if settings.redis_url is not None:
            prefix = settings.redis_prefix
            link = Link(open_client(settings), telemetry, seconds=settings.redis_seconds)
            shared = RedisStore(link, telemetry, prefix=prefix, cache_seconds=CACHE_TTL_SECONDS)
            store, limiter = shared, SharedLimiter(link, telemetry, prefix=prefix)
            tasks = (limiter, shared, link)
        return cls(limiter=limiter, store=store, tasks=tasks)


def text_bounds(settings: Settings) -> Bounds:
    """Return the bounds on one request."""
    return Bounds(settings.max_sequences, settings.max_request_tokens, settings.max_request_characters)


def _access_log(settings: Settings, log: LineWriter | None, telemetry: Telemetry) -> AccessLog | None:
    if log is None:
        return None
    telemetry.watch(lambda: dropped_lines(log.dropped))
    return None if settings.access_log == "off" else AccessLog(log)


def _exporter(settings: Settings, telemetry: Telemetry) -> Exporter | None:
    """Return the exporter of traces; None if tracing is off. Raises :class:`SettingsError`."""
    try:
        exporter = open_exporter(settings.tracing_endpoint, None, default_service="yardstick-gateway")
    except TracingError as error:
        raise SettingsError(f"YARDSTICK_TRACING_ENDPOINT: {error}") from None
    if exporter is not None:
        telemetry.watch(lambda: dropped_spans(exporter.dropped))
    return exporter
