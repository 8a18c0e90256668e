"""Parts of the gateway that take several settings each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.auth.keyring import KeyRing
from gateway.catalogues.memory import MemoryCatalogues
from gateway.images.fetch import ImageFetcher
from gateway.logs.access import AccessLog
from gateway.logs.writer import LineWriter
from gateway.metrics.telemetry import Telemetry
from gateway.pool.client import EngineClient, EngineToken
from gateway.pool.replica import Health, Replica
from gateway.settings import Settings, SettingsError
from gateway.text.bounds import Bounds
from gateway.workers.job_queue import Capacity
from gateway.workers.workers import default_workers
from tracing.export import Exporter, TracingError
from tracing.setup import open_exporter


def key_ring(settings: Settings, file: Path) -> KeyRing:
    """Create the key ring. Raises :class:`SettingsError`."""
    return KeyRing(file, stale_seconds=settings.api_keys_stale_seconds, isolation=settings.cache_isolation)


def text_capacity(settings: Settings) -> Capacity:
    workers = settings.text_workers or default_workers()
    return Capacity(workers, settings.text_job_mib, settings.text_queue, settings.text_queue_bytes, settings.short_texts)


def image_fetcher(settings: Settings, telemetry: Telemetry) -> ImageFetcher:
    hosts, seconds, most = settings.image_hosts, settings.image_seconds, settings.image_bytes
    whole = settings.max_body_bytes
    return ImageFetcher(hosts, telemetry.images, seconds=seconds, most_bytes=most, most_request_bytes=whole)


def catalogues_in_memory(settings: Settings, telemetry: Telemetry) -> MemoryCatalogues:
    store = MemoryCatalogues(settings.catalogue_bounds)
    telemetry.catalogues.watch(lambda: store.catalogues, lambda: store.items, lambda: store.bytes)
    return store


def text_bounds(settings: Settings) -> Bounds:
    return Bounds(**{name: getattr(settings, name) for name in Bounds.__struct_fields__})


def connector(settings: Settings) -> Callable[[str, str], Replica]:
    """Return a function that creates the replica for a URL and the entry that listed it. Raises :class:`SettingsError` if the
    engine token is missing."""
    token = _read_token(settings.engine_token_file) if settings.engine_token_file else None

    def connect(url: str, entry: str) -> Replica:
        client = EngineClient(url, connect_seconds=settings.connect_seconds, engine_seconds=settings.engine_seconds, token=token)
        return Replica(client, entry, Health(settings.eject_failures, settings.eject_seconds))

    return connect


def _read_token(file: Path) -> EngineToken:
    """Read the engine token. Raises :class:`SettingsError`."""
    try:
        return EngineToken(file)
    except (OSError, ValueError) as error:
        raise SettingsError(f"YARDSTICK_ENGINE_TOKEN_FILE: {error}") from None


def access_log_of(settings: Settings, log: LineWriter | None, telemetry: Telemetry) -> AccessLog | None:
    if log is None:
        return None
    telemetry.watch_log(lambda: log.dropped)
    return None if settings.access_log == "off" else AccessLog(log, settings.access_log, probes=settings.access_log_probes)


def exporter_of(settings: Settings, telemetry: Telemetry) -> Exporter | None:
    """Return the exporter of traces; None if tracing is off. Raises :class:`SettingsError`."""
    try:
        exporter = open_exporter(settings.tracing_endpoint, settings.tracing_service, default_service="yardstick-gateway")
    except TracingError as error:
        raise SettingsError(f"YARDSTICK_TRACING_ENDPOINT: {error}") from None
    if exporter is not None:
        telemetry.watch_traces(lambda: exporter.dropped)
    return exporter
