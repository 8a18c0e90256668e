"""Errors of engines and of the web framework as errors of the gateway."""

from __future__ import annotations

from engine import wire
from gateway.errors import (
    AdapterNotFound,
    BodyTooLarge,
    DeadlineExceeded,
    EngineLost,
    GatewayError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    OutOfMemory,
    Overloaded,
)

_ERROR_OF_CODE: dict[wire.ErrorCode, type[GatewayError]] = {
    "invalid": InvalidRequest,
    "unauthorized": InternalError,
    "unknown_adapter": AdapterNotFound,
    "overloaded": Overloaded,
    "not_ready": NotReady,
    "deadline": DeadlineExceeded,
    "aborted": EngineLost,
    "out_of_memory": OutOfMemory,
    "internal": InternalError,
}


def from_engine(failed: wire.Failed) -> GatewayError:
    """Convert an engine's failure for the client. ``aborted`` is an engine fault here: a client that left reads no response."""
    error = _ERROR_OF_CODE[failed.code]
    if error is AdapterNotFound:
        message = "The adapter was unloaded; GET /v1/models lists what is served."
        return AdapterNotFound(message, param="model", retryable=True)
    waits = error in (Overloaded, NotReady)
    return error(failed.message, retry_after=failed.retry_after or 1.0 if waits else None, retryable=failed.retryable)


def from_status(status: int, detail: str) -> GatewayError:
    """Convert errors of the web framework (routing, body size) to the same classes."""
    if status == 404:
        return NotFound("This path does not exist. The endpoints are listed at /schema.")
    if status == 405:
        return MethodNotAllowed("This path does not support this method. The endpoints are listed at /schema.")
    if status == 413:
        return BodyTooLarge("The request body is larger than this server accepts. Send the items in several requests.")
    if 400 <= status < 500:
        return InvalidRequest(detail or "The request is not valid.")
    return InternalError("An internal error occurred. Quote the x-request-id of this answer when you report it.")
