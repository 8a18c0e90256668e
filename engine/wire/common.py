"""Types that messages of all kinds use: the caller, aborts and failures."""

from __future__ import annotations

from typing import Literal

import msgspec

MODEL_HEADER = "x-yardstick-model"
"""The name of the model, percent-encoded; sent while it is loading as well."""
ADAPTERS_HEADER = "x-yardstick-adapters"
"""Revision of the answer of ``GET /adapters``, in ASCII. Another list and another process have another revision."""
ErrorCode = Literal[
    "invalid", "unauthorized", "unknown_adapter", "overloaded", "not_ready", "deadline", "aborted", "out_of_memory", "internal"
]
"""``unknown_adapter``: the engine has no adapter of this digest or name; another replica may."""
STATUS_OF_CODE: dict[str, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "unknown_adapter": 404,
    "overloaded": 429,
    "not_ready": 503,
    "deadline": 504,
    "aborted": 499,
    "out_of_memory": 503,
    "internal": 500,
}


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client on whose behalf a request runs."""

    request_id: str = ""
    """The `x-request-id` of the client's request; the engine's log names it."""
    tenant: str = ""
    """The flow of the engine's fair queue: an opaque id of the API key, never a secret. Empty: the gateway asks for no keys."""
    weight: float = 1.0
    """Share of the engine relative to other tenants; 0.001 to 1000."""
    cache_salt: str = ""
    """Namespace in the prefix cache: only requests with an equal salt share cached tokens."""
    keep_prefix: bool = True
    """False: the prefix cache shares nothing with this request and keeps nothing of it after its end."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request. It still gets its terminal message."""

    id: str


class Failed(msgspec.Struct, tag="failed", frozen=True, omit_defaults=True):
    """The request ended without a result."""

    id: str
    code: ErrorCode
    message: str
    """The problem and its remedy, for a person; no paths, no tracebacks."""
    retryable: bool = False
    """True where the same request may succeed on another replica, or here later."""
    retry_after: float | None = None
    """Seconds."""
