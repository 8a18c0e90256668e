"""The composition root: creates the application from the settings. It has no logic of its own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from litestar import Litestar, Router
from litestar.exceptions import HTTPException

from gateway.adapters.manager import AdapterManager
from gateway.adapters.restoring import Restorer
from gateway.adapters.store import MemoryLoaded
from gateway.application import Gateway, answer_error, answer_fault, answer_refusal
from gateway.auth import RequireKey
from gateway.cache.base import ResultCache
from gateway.cache.memory import MemoryCache
from gateway.cache.metered import MeteredCache
from gateway.catalogues.catalogues import Catalogues
from gateway.catalogues.memory import MemoryCatalogues
from gateway.catalogues.store import CatalogueStore
from gateway.edge.cors import Origins
from gateway.edge.local import LocalGuard
from gateway.edge.protocol import protocol_factory
from gateway.errors import GatewayError
from gateway.images.fetch import ImageFetcher
from gateway.images.room import ImageRoom
from gateway.keyring import KeyRing
from gateway.lifecycle import Lifecycle
from gateway.limits.admission import Admission
from gateway.limits.base import Limiter
from gateway.limits.local import LocalLimiter
from gateway.limits.quotas import Quotas
from gateway.logs.access import AccessLog
from gateway.logs.writer import LineWriter
from gateway.metrics.telemetry import Telemetry
from gateway.openapi import KEY, NO_KEY, DocumentedStructs, asset_route, openapi_config
from gateway.pool.client import Connections, EngineClient, EngineToken
from gateway.pool.discovery.create import discover
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut
from gateway.pool.handover import Handover
from gateway.pool.health import Health
from gateway.pool.names import Names
from gateway.pool.pool import Pool
from gateway.pool.recent_items import RecentItems, Room
from gateway.pool.replica import Replica
from gateway.redis.share import Share
from gateway.responses.kept import Kept
from gateway.responses.store import MemoryStore
from gateway.routes.adapters import adapter_routes
from gateway.routes.catalogue_prompts import CataloguePrompts
from gateway.routes.catalogue_scan import Scanner
from gateway.routes.catalogue_warm import warm_route
from gateway.routes.catalogues import catalogue_routes
from gateway.routes.chat import chat_route
from gateway.routes.classify import classify_route
from gateway.routes.completions import completion_route
from gateway.routes.console import console_routes
from gateway.routes.embeddings import embeddings_route
from gateway.routes.generating import Generator
from gateway.routes.health import health_routes
from gateway.routes.length import length_route
from gateway.routes.models import model_routes
from gateway.routes.patience import Patience
from gateway.routes.reading import Reader
from gateway.routes.rerank import rerank_route
from gateway.routes.responding import Responder
from gateway.routes.responses import response_routes
from gateway.routes.score import score_route
from gateway.routes.scoring import Scoring
from gateway.routes.tokenize import tokenize_routes
from gateway.scoring.scorer import Scorer
from gateway.settings import Settings, SettingsError
from gateway.streams import Streams
from gateway.text.bounds import Bounds
from gateway.text.job_queue import Capacity
from gateway.text.workers import Workers, default_workers
from gateway.tracing import Tracer
from gateway.watchdog import Watchdog
from tracing.export import Exporter, TracingError, open_exporter
from tracing.sampling import sampler_of

logger = logging.getLogger(__name__)

START_SECONDS = 1.0
"""Time after the start from which the watchdog measures delays of the event loop."""


def create_app(
    settings: Settings,
    *,
    cache: ResultCache | None = None,
    lifecycle: Lifecycle | None = None,
    log: LineWriter | None = None,
    fetcher: ImageFetcher | None = None,
) -> Gateway:
    """Create the gateway. ``cache`` None: Redis if it is configured, else the in-process cache. ``log`` None: no access log.
    ``fetcher`` None: as the settings say. Raises :class:`SettingsError` for an invalid key file or a missing engine token."""
    lifecycle = lifecycle or Lifecycle()
    telemetry = Telemetry()
    connections = Connections()
    sources = {entry: discover(entry, resolve_seconds=settings.resolve_seconds) for entry in settings.engines}
    watchdog = Watchdog(telemetry)
    workers = Workers(_text_capacity(settings), telemetry)
    reader = Reader(
        workers,
        _bounds(settings),
        telemetry,
        text_seconds=settings.text_seconds,
        job_mib=settings.text_job_mib,
        fetcher=fetcher or _fetcher(settings, telemetry),
        image_room=ImageRoom(settings.max_bytes_in_flight),
        formats=settings.chosen_formats,
    )
    dispatcher = Dispatcher(
        telemetry, wait_seconds=settings.wait_seconds, max_waiting=settings.max_waiting, hedge_budget=settings.hedge_budget
    )
    fan_out = FanOut(dispatcher, telemetry, split_tokens=settings.split_tokens)
    handover = Handover(fan_out, telemetry, seconds=settings.handover_seconds)
    pool = Pool(
        sources,
        _connector(settings, connections),
        telemetry,
        workers,
        probe_seconds=settings.probe_seconds,
        silence_seconds=settings.silence_seconds,
        startup_seconds=settings.startup_seconds,
        presets=settings.chosen_presets,
        names=Names(settings.chosen_aliases, settings.chosen_fallbacks),
        leaving=handover.begin,
    )
    share = Share.opened(settings, telemetry) if settings.redis_url is not None else None
    results = cache or (share.cache if share else MemoryCache(settings.cache_entries, settings.cache_bytes))
    scorer = Scorer(MeteredCache(results, telemetry), fan_out)
    limiter: Limiter = share.limiter if share else LocalLimiter()
    quotas = Quotas(limiter, telemetry)
    streams = Streams(settings.keepalive_seconds)
    scoring = Scoring(scorer, quotas, telemetry, streams)
    generator = Generator(dispatcher, quotas, telemetry, streams)
    responses = share.responses if share else MemoryStore(settings.store_bounds)
    stored: CatalogueStore = share.catalogues if share else _catalogues_in_memory(settings, telemetry)
    catalogues = Catalogues(stored, telemetry)
    prompts = CataloguePrompts(catalogues, pool, reader.bounds, settings.catalogue_request_items)
    scanner = Scanner(prompts, scoring, Patience(telemetry, settings.scan_wait_seconds))
    adapters = AdapterManager(pool, share.adapters if share else MemoryLoaded(), telemetry)
    restorer = Restorer(pool, adapters, telemetry, interval=settings.probe_seconds)
    kept = Kept(responses, telemetry, stores=settings.stored_responses > 0, most_bytes=settings.stored_response_bytes)
    keys = _key_ring(settings, settings.api_keys_file) if settings.api_keys_file else None
    origins = Origins(settings.cors_origins)

    access_log = _access_log(settings, log, telemetry)
    exporter = _exporter(settings, telemetry)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        watchdog.start(after=START_SECONDS)
        workers.start()
        pool.start()
        restorer.start()
        if exporter:
            exporter.start()
        if keys:
            keys.start(telemetry)
        if share:
            share.start()
        try:
            yield
        finally:
            if keys:
                keys.stop()
            await restorer.stop()
            await pool.stop()
            await handover.stop()
            await workers.stop()
            watchdog.stop()
            if share:
                await share.stop()
            await connections.close()
            if exporter:
                await asyncio.to_thread(exporter.close)

    v1 = Router(
        path="",
        route_handlers=[
            score_route(pool, reader, scoring, scanner),
            rerank_route(pool, reader, scoring, scanner),
            *catalogue_routes(pool, reader, catalogues, quotas),
            warm_route(reader, prompts, scoring, fan_out),
            classify_route(pool, reader, scoring),
            embeddings_route(pool, reader, scoring),
            completion_route(pool, reader, generator),
            chat_route(pool, reader, generator),
            *response_routes(pool, reader, Responder(generator, kept)),
            length_route(pool, reader, scoring),
            *model_routes(pool),
            *tokenize_routes(pool, reader, quotas, workers),
            *adapter_routes(pool, adapters, quotas),
        ],
        middleware=[*([RequireKey(keys)] if keys else []), Admission(settings, telemetry)],
        security=KEY if keys else NO_KEY,
    )
    return Gateway(
        telemetry,
        lifecycle,
        log=access_log,
        tracer=Tracer(sampler_of(settings.tracing_ratio, os.environ), exporter) if exporter else None,
        protocol=protocol_factory(settings, telemetry, access_log),
        check=origins.refusal if keys else LocalGuard(settings.allowed_hosts, origins, telemetry).refusal,
        route_handlers=[
            v1,
            *health_routes(pool, keys, telemetry, lifecycle),
            asset_route(),
            *(console_routes() if settings.console else []),
        ],
        lifespan=[lifespan],
        request_max_body_size=settings.max_body_bytes,
        exception_handlers={GatewayError: answer_error, HTTPException: answer_refusal, Exception: answer_fault},
        cors_config=origins.config(),
        openapi_config=openapi_config(),
        plugins=[DocumentedStructs()],
        logging_config=None,
    )


def _key_ring(settings: Settings, file: Path) -> KeyRing:
    """Create the key ring. Raises :class:`SettingsError`."""
    return KeyRing(file, stale_seconds=settings.api_keys_stale_seconds, isolation=settings.cache_isolation)


def _text_capacity(settings: Settings) -> Capacity:
    workers = settings.text_workers or default_workers()
    return Capacity(workers, settings.text_job_mib, settings.text_queue, settings.text_queue_bytes)


def _fetcher(settings: Settings, telemetry: Telemetry) -> ImageFetcher:
    hosts, seconds, most = settings.image_hosts, settings.image_seconds, settings.image_bytes
    whole = settings.max_body_bytes
    return ImageFetcher(hosts, telemetry.images, seconds=seconds, most_bytes=most, most_request_bytes=whole)


def _catalogues_in_memory(settings: Settings, telemetry: Telemetry) -> MemoryCatalogues:
    store = MemoryCatalogues(settings.catalogue_bounds)
    telemetry.catalogues.watch(lambda: store.catalogues, lambda: store.items, lambda: store.bytes)
    return store


def _bounds(settings: Settings) -> Bounds:
    return Bounds(**{name: getattr(settings, name) for name in Bounds.__struct_fields__})


def _connector(settings: Settings, connections: Connections) -> Callable[[str, str], Replica]:
    """Return a function that creates the replica for a URL and the entry that listed it. Raises :class:`SettingsError` if the
    engine token is missing."""
    token = _read_token(settings.engine_token_file) if settings.engine_token_file else None
    room = Room(settings.handover_bytes)

    def connect(url: str, entry: str) -> Replica:
        client = EngineClient(
            url, connections, connect_seconds=settings.connect_seconds, engine_seconds=settings.engine_seconds, token=token
        )
        items = RecentItems(settings.handover_items, room)
        return Replica(client, entry, Health(settings.eject_failures, settings.eject_seconds), items=items)

    return connect


def _read_token(file: Path) -> EngineToken:
    """Read the engine token. Raises :class:`SettingsError`."""
    try:
        return EngineToken(file)
    except (OSError, ValueError) as error:
        raise SettingsError(f"YARDSTICK_ENGINE_TOKEN_FILE: {error}") from None


def _access_log(settings: Settings, log: LineWriter | None, telemetry: Telemetry) -> AccessLog | None:
    if log is None:
        return None
    telemetry.watch_log(lambda: log.dropped)
    return None if settings.access_log == "off" else AccessLog(log, settings.access_log, probes=settings.access_log_probes)


def _exporter(settings: Settings, telemetry: Telemetry) -> Exporter | None:
    """Return the exporter of traces; None if tracing is off. Raises :class:`SettingsError`."""
    try:
        exporter = open_exporter(settings.tracing_endpoint, settings.tracing_service, default_service="yardstick-gateway")
    except TracingError as error:
        raise SettingsError(f"YARDSTICK_TRACING_ENDPOINT: {error}") from None
    if exporter is not None:
        telemetry.watch_traces(lambda: exporter.dropped)
    return exporter
