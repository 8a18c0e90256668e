"""The exporter that settings and OpenTelemetry's variables ask for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from yardstick_llm.tracing.export import BATCH_SPANS, DELAY_SECONDS, MAX_SPANS, Exporter, TracingError

logger = logging.getLogger(__name__)


def open_exporter(
    endpoint: str | None, service: str | None, *, default_service: str, environment: Mapping[str, str] = os.environ
) -> Exporter | None:
    """Return an exporter to ``endpoint``, or to the one that OpenTelemetry's variables name; None if tracing is off.

    Raises :class:`TracingError` if OpenTelemetry is not installed and ``endpoint`` asks for it.
    """
    if not _wanted(endpoint, environment):
        return None
    try:
        from yardstick_llm.tracing.otlp import sender
    except ImportError as error:
        problem = f"traces need OpenTelemetry ({error.name} is missing); install it with: pip install 'yardstick-llm[tracing]'"
        if endpoint is not None:
            raise TracingError(problem) from None
        logger.warning("%s", problem)
        return None
    return Exporter(
        *sender(endpoint, service, default_service),
        max_spans=_number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_SPANS),
        batch_spans=_number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS),
        delay_seconds=_number(environment, "OTEL_BSP_SCHEDULE_DELAY", round(1000 * DELAY_SECONDS)) / 1000,
    )


def _wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether traces are to be exported."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if endpoint is not None:
        return True
    if not (environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return False
    if "otlp" not in environment.get("OTEL_TRACES_EXPORTER", "otlp"):
        return False
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        logger.warning("OTEL_EXPORTER_OTLP_PROTOCOL is %r: traces are off, because they are sent with http/protobuf only", protocol)
        return False
    return True


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31:
        return int(text)
    logger.warning("%s: %r is not a positive number; %d is used", name, text, default)
    return default


def check_endpoint(endpoint: str) -> None:
    """Check the URL of a collector. Raises :class:`TracingError`, whose message does not contain the URL."""
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # an invalid port
        known = False
    if not known or "@" in endpoint:
        raise TracingError("write it like http://HOST:4318; secrets belong in OTEL_EXPORTER_OTLP_HEADERS")
