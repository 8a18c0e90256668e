"""The composition root: creates the application from the settings. It has no logic of its own."""

from __future__ import annotations

import os

from litestar import Router
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler

from gateway.adapters.manager import AdapterManager
from gateway.admission.in_flight import InFlightLimit
from gateway.admission.quotas import Quotas
from gateway.application import Gateway, answer_error, answer_fault, answer_refusal
from gateway.auth.require_key import RequireKey
from gateway.cache.base import ResultCache
from gateway.catalogues.catalogues import Catalogues
from gateway.composition.background import Background
from gateway.composition.fleet import Fleet
from gateway.composition.parts import (
    access_log_of,
    exporter_of,
    image_fetcher,
    key_ring,
    text_bounds,
    text_capacity,
)
from gateway.composition.stores import Stores
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
from gateway.images.room import ImageRoom
from gateway.logs.writer import LineWriter
from gateway.metrics.telemetry import Telemetry
from gateway.process.lifecycle import Lifecycle
from gateway.process.watchdog import Watchdog
from gateway.responses.kept import Kept
from gateway.routes.adapters import adapter_routes
from gateway.routes.catalogue_warm import warm_route
from gateway.routes.catalogues import catalogue_routes
from gateway.routes.chat import chat_route
from gateway.routes.classify import classify_route
from gateway.routes.completions import completion_route
from gateway.routes.console import console_routes
from gateway.routes.embeddings import embeddings_routes
from gateway.routes.health import health_routes
from gateway.routes.length import length_route
from gateway.routes.models import model_routes
from gateway.routes.rerank import rerank_route
from gateway.routes.responses import response_routes
from gateway.routes.score import score_route
from gateway.routes.tei import tei_routes
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
) -> Gateway:
    """Create the gateway. ``cache`` None: Redis if it is configured, else the in-process cache. ``log`` None: no access log.
    Raises :class:`SettingsError` for an invalid key file or a missing engine token."""
    lifecycle = lifecycle or Lifecycle()
    telemetry = Telemetry(usage_keys=settings.usage_keys)
    workers = Workers(text_capacity(settings), telemetry)
    stores = Stores.opened(settings, telemetry, cache)
    fleet = Fleet.of(settings, telemetry, workers)
    adapters = AdapterManager(fleet.pool, stores.adapters, telemetry, interval=settings.probe_seconds)
    keys = key_ring(settings, settings.api_keys_file) if settings.api_keys_file else None
    origins = Origins(settings.cors_origins)
    access_log = access_log_of(settings, log, telemetry)
    exporter = exporter_of(settings, telemetry)
    background = Background(
        watchdog=Watchdog(telemetry),
        workers=workers,
        fleet=fleet,
        adapters=adapters,
        keys=keys,
        share=stores.share,
        exporter=exporter,
        telemetry=telemetry,
    )
    quotas = Quotas(stores.limiter, telemetry)
    v1 = Router(
        path="",
        route_handlers=_v1(settings, telemetry, workers, stores, fleet, adapters, quotas),
        middleware=[*([RequireKey(keys)] if keys else []), InFlightLimit(settings, telemetry, quotas)],
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
            *health_routes(fleet.pool, keys, telemetry, lifecycle, metrics_names=settings.metrics_names),
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


def _v1(
    settings: Settings,
    telemetry: Telemetry,
    workers: Workers,
    stores: Stores,
    fleet: Fleet,
    adapters: AdapterManager,
    quotas: Quotas,
) -> list[HTTPRouteHandler]:
    """Create the endpoints that need an API key, on a server with keys."""
    pool = fleet.pool
    reader = Reader(
        workers,
        text_bounds(settings),
        telemetry,
        text_seconds=settings.text_seconds,
        job_mib=settings.text_job_mib,
        fetcher=image_fetcher(settings, telemetry),
        image_room=ImageRoom(settings.max_bytes_in_flight, telemetry.images),
        quotas=quotas,
        formats=settings.chosen_formats,
    )
    streams = Streams(settings.keepalive_seconds)
    scoring = Scoring(Scorer(stores.cache, fleet.fan_out, telemetry), quotas, telemetry, streams)
    generator = Generator(fleet.dispatcher, quotas, telemetry, streams)
    catalogues = Catalogues(stores.catalogues, telemetry)
    prompts = CataloguePrompts(catalogues, pool, reader.bounds, settings.catalogue_request_items)
    retries = RetryDeadline(telemetry, settings.scan_wait_seconds)
    scanner = Scanner(prompts, scoring, retries)
    kept = Kept(stores.responses, telemetry, stores=settings.stored_responses > 0, most_bytes=settings.stored_response_bytes)
    return [
        score_route(pool, reader, scoring, scanner),
        rerank_route(pool, reader, scoring, scanner),
        *catalogue_routes(pool, reader, catalogues, quotas),
        warm_route(reader, prompts, scoring, fleet.fan_out, retries),
        classify_route(pool, reader, scoring),
        *embeddings_routes(pool, reader, scoring),
        *tei_routes(pool, reader, scoring),
        completion_route(pool, reader, generator),
        chat_route(pool, reader, generator),
        *response_routes(pool, reader, Responder(generator, kept)),
        length_route(pool, reader, scoring),
        *model_routes(pool),
        *tokenize_routes(pool, reader, quotas, workers),
        *adapter_routes(pool, adapters, quotas),
    ]
