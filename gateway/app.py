"""The composition root: creates the application from the settings. It has no logic of its own."""

from __future__ import annotations

import os

from litestar import Router
from litestar.exceptions import HTTPException

from gateway.adapters.manager import AdapterManager
from gateway.adapters.restoring import Restorer
from gateway.adapters.store import MemoryLoaded
from gateway.admission.in_flight import InFlightLimit
from gateway.admission.quotas import Quotas
from gateway.application import Gateway, answer_error, answer_fault, answer_refusal
from gateway.auth.require_key import RequireKey
from gateway.cache.base import ResultCache
from gateway.cache.memory import MemoryCache
from gateway.cache.metered import MeteredCache
from gateway.catalogues.catalogues import Catalogues
from gateway.catalogues.store import CatalogueStore
from gateway.composition.background import Background
from gateway.composition.parts import (
    access_log_of,
    catalogues_in_memory,
    connector,
    exporter_of,
    image_fetcher,
    key_ring,
    text_bounds,
    text_capacity,
)
from gateway.composition.share import Share
from gateway.edge.cors import Origins
from gateway.edge.local import LocalGuard
from gateway.edge.protocol import protocol_factory
from gateway.errors import GatewayError
from gateway.handling.catalogue_prompts import CataloguePrompts
from gateway.handling.catalogue_scan import Scanner
from gateway.handling.generator import Generator
from gateway.handling.openapi import KEY, NO_KEY, DocumentedStructs, asset_route, openapi_config
from gateway.handling.reader import Reader
from gateway.handling.responder import Responder
from gateway.handling.retry_deadline import RetryDeadline
from gateway.handling.scoring import Scoring
from gateway.handling.streams import Streams
from gateway.images.fetch import ImageFetcher
from gateway.images.room import ImageRoom
from gateway.limits.base import Limiter
from gateway.limits.local import LocalLimiter
from gateway.logs.writer import LineWriter
from gateway.metrics.telemetry import Telemetry
from gateway.pool.client import Connections
from gateway.pool.discovery.create import discover
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut
from gateway.pool.handover import Handover
from gateway.pool.item_caches import ItemCaches
from gateway.pool.names import Names
from gateway.pool.pool import Pool
from gateway.process.lifecycle import Lifecycle
from gateway.process.watchdog import Watchdog
from gateway.responses.kept import Kept
from gateway.responses.store import MemoryStore
from gateway.routes.adapters import adapter_routes
from gateway.routes.catalogue_warm import warm_route
from gateway.routes.catalogues import catalogue_routes
from gateway.routes.chat import chat_route
from gateway.routes.classify import classify_route
from gateway.routes.completions import completion_route
from gateway.routes.console import console_routes
from gateway.routes.embeddings import embeddings_route
from gateway.routes.health import health_routes
from gateway.routes.length import length_route
from gateway.routes.models import model_routes
from gateway.routes.rerank import rerank_route
from gateway.routes.responses import response_routes
from gateway.routes.score import score_route
from gateway.routes.tokenize import tokenize_routes
from gateway.scoring.scorer import Scorer
from gateway.settings import Settings
from gateway.tracing import Tracer
from gateway.workers.workers import Workers
from tracing.sampling import sampler_of


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
    workers = Workers(text_capacity(settings), telemetry)
    share = Share.opened(settings, telemetry) if settings.redis_url is not None else None
    limiter: Limiter = share.limiter if share else LocalLimiter()
    quotas = Quotas(limiter, telemetry)
    reader = Reader(
        workers,
        text_bounds(settings),
        telemetry,
        text_seconds=settings.text_seconds,
        job_mib=settings.text_job_mib,
        fetcher=fetcher or image_fetcher(settings, telemetry),
        image_room=ImageRoom(settings.max_bytes_in_flight, telemetry.images),
        quotas=quotas,
        formats=settings.chosen_formats,
    )
    dispatcher = Dispatcher(
        telemetry, wait_seconds=settings.wait_seconds, max_waiting=settings.max_waiting, hedge_budget=settings.hedge_budget
    )
    fan_out = FanOut(dispatcher, telemetry, split_tokens=settings.split_tokens)
    handover = Handover(fan_out, telemetry, seconds=settings.handover_seconds)
    pool = Pool(
        sources,
        connector(settings, connections),
        telemetry,
        workers,
        probe_seconds=settings.probe_seconds,
        silence_seconds=settings.silence_seconds,
        startup_seconds=settings.startup_seconds,
        presets=settings.chosen_presets,
        names=Names(settings.chosen_aliases, settings.chosen_fallbacks),
        leaving=handover.begin,
    )
    item_caches = ItemCaches(pool, telemetry)
    results = cache or (share.cache if share else MemoryCache(settings.cache_entries, settings.cache_bytes))
    scorer = Scorer(MeteredCache(results, telemetry), fan_out)
    streams = Streams(settings.keepalive_seconds)
    scoring = Scoring(scorer, quotas, telemetry, streams)
    generator = Generator(dispatcher, quotas, telemetry, streams)
    responses = share.responses if share else MemoryStore(settings.store_bounds)
    stored: CatalogueStore = share.catalogues if share else catalogues_in_memory(settings, telemetry)
    catalogues = Catalogues(stored, telemetry)
    prompts = CataloguePrompts(catalogues, pool, reader.bounds, settings.catalogue_request_items)
    retries = RetryDeadline(telemetry, settings.scan_wait_seconds)
    scanner = Scanner(prompts, scoring, retries)
    adapters = AdapterManager(pool, share.adapters if share else MemoryLoaded(), telemetry)
    kept = Kept(responses, telemetry, stores=settings.stored_responses > 0, most_bytes=settings.stored_response_bytes)
    keys = key_ring(settings, settings.api_keys_file) if settings.api_keys_file else None
    origins = Origins(settings.cors_origins)
    access_log = access_log_of(settings, log, telemetry)
    exporter = exporter_of(settings, telemetry)

    background = Background(
        watchdog=Watchdog(telemetry),
        workers=workers,
        pool=pool,
        restorer=Restorer(pool, adapters, telemetry, interval=settings.probe_seconds),
        item_caches=item_caches,
        handover=handover,
        connections=connections,
        keys=keys,
        share=share,
        exporter=exporter,
        telemetry=telemetry,
    )
    v1 = Router(
        path="",
        route_handlers=[
            score_route(pool, reader, scoring, scanner),
            rerank_route(pool, reader, scoring, scanner),
            *catalogue_routes(pool, reader, catalogues, quotas),
            warm_route(reader, prompts, scoring, fan_out, retries),
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
        middleware=[*([RequireKey(keys)] if keys else []), InFlightLimit(settings, telemetry)],
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
        lifespan=[background.running],
        request_max_body_size=settings.max_body_bytes,
        exception_handlers={GatewayError: answer_error, HTTPException: answer_refusal, Exception: answer_fault},
        cors_config=origins.config(),
        openapi_config=openapi_config(),
        plugins=[DocumentedStructs()],
        logging_config=None,
    )
