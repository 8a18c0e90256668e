"""Gateways with other constants than those in the code, so that tests need not wait or send as much as clients may.

``python -m tests.tuned`` is ``python -m yardstick_llm.gateway`` with the constants in the variable ``TUNED``, a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import msgspec

from yardstick_llm.gateway.settings import Settings
from yardstick_llm.gateway.text.prepared import Bounds

VARIABLE = "TUNED"
CONSTANTS = {
    "api_keys_stale_seconds": "yardstick_llm.gateway.app:KEYS_STALE_SECONDS",
    "body_bytes_per_second": "yardstick_llm.gateway.http.connection:BODY_BYTES_PER_SECOND",
    "body_seconds": "yardstick_llm.gateway.http.connection:BODY_SECONDS",
    "cache_ttl_seconds": "yardstick_llm.gateway.app:CACHE_TTL_SECONDS",
    "header_seconds": "yardstick_llm.gateway.http.connection:HEADER_SECONDS",
    "image_seconds": "yardstick_llm.gateway.app:IMAGE_SECONDS",
    "keepalive_seconds": "yardstick_llm.gateway.app:KEEPALIVE_SECONDS",
    "silence_seconds": "yardstick_llm.gateway.app:SILENCE_SECONDS",
    "stored_responses": "yardstick_llm.gateway.api.responses:STORED_RESPONSES",
    "text_job_mib": "yardstick_llm.gateway.app:TEXT_JOB_MIB",
    "write_seconds": "yardstick_llm.gateway.http.connection:WRITE_SECONDS",
}
"""Where each constant is."""
DERIVED = ("max_bytes_in_flight", "max_uploads", "max_waiting", "stored_response_bytes", "text_queue_bytes")
"""Properties of the settings."""


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {name: value for name, value in given.items() if name in Settings.__struct_fields__}
    return settings, {name: value for name, value in given.items() if name not in settings}


@contextmanager
def tuned(constants: Mapping[str, Any]) -> Iterator[None]:
    """Change constants, properties of the settings, and bounds on one request."""
    with ExitStack() as stack:
        bounds = {}
        for name, value in constants.items():
            if name in Bounds.__struct_fields__:
                bounds[name] = value
            elif name in DERIVED:
                stack.enter_context(mock.patch.object(Settings, name, value))
            else:
                module, _, constant = CONSTANTS[name].partition(":")
                stack.enter_context(mock.patch.object(import_module(module), constant, value))
        if bounds:
            app = import_module("yardstick_llm.gateway.app")
            usual: Callable[[Settings], Bounds] = app.text_bounds
            stack.enter_context(
                mock.patch.object(app, "text_bounds", lambda settings: msgspec.structs.replace(usual(settings), **bounds))
            )
        yield


def environment(given: Mapping[str, Any]) -> dict[str, str]:
    """Variables for ``python -m tests.tuned`` with these settings and constants."""
    settings, constants = split(given)
    variables = {f"YARDSTICK_{name.upper()}": str(value) for name, value in settings.items()}
    return variables | {VARIABLE: json.dumps(constants)}


def main() -> int:
    from yardstick_llm.gateway.server import main as serve

    with tuned(json.loads(os.environ.get(VARIABLE, "{}"))):
        return serve()


if __name__ == "__main__":
    sys.exit(main())
