"""All errors that a client may see, with OpenAI's error bodies and HTTP status codes.

::

    GatewayError
    ├── InvalidRequest          400  the request is invalid; ``param`` names the field
    │   ├── InvalidImage        400  an image cannot be used
    │   └── ContextExceeded     400  a prompt is longer than the model's context
    ├── Unauthorized            401  an API key is missing or unknown
    │   └── KeyExpired          401  an API key has expired
    ├── Forbidden               403  a web page of another origin sent a request to a server without keys
    │   └── NotPermitted        403  the key may not do this
    ├── NotFound                404  no such path
    │   ├── ModelNotFound       404  no engine serves this model
    │   │   └── AdapterNotFound 404  no engine has this adapter
    │   ├── ResponseNotFound    404  no such stored response, or another key's
    │   ├── CatalogueNotFound   404  no such catalogue, or another trust group's
    │   └── ItemNotFound        404  items that a catalogue does not have
    ├── MethodNotAllowed        405
    ├── RequestTimeout          408  headers or body did not arrive in time
    ├── Conflict                409  a catalogue of this name differs, or was made for another tokeniser; an adapter is being
    │                                loaded, which comes with Retry-After
    ├── BodyTooLarge            413
    ├── StoreFull               413  there is no room for more items of catalogues, or for more loaded adapters
    ├── UnsupportedMediaType    415  the body is not JSON
    │   └── UnsupportedEncoding 415  the body has a content coding that is not supported
    ├── Misdirected             421  the Host header names another server
    ├── HeadersTooLarge         431
    ├── Overloaded              429  gateway or engine is full; comes with Retry-After
    ├── RateLimited             429  a limit of the key is reached; comes with Retry-After if waiting helps
    ├── ClientGone              499  the client has left
    ├── InternalError           500  a bug in the gateway or the engine
    ├── NotANumber              500  the model's numbers overflow for a prompt; no other try changes that
    ├── EngineLost              502  the engine disconnected, or sent invalid data, during a request
    ├── NotReady                503  no replica of the model is ready; comes with Retry-After
    │   └── UnusableModel       503  an engine serves a model whose tokeniser or template cannot be used
    ├── StoreUnavailable        503  responses or catalogues cannot be stored or read at present; comes with Retry-After
    ├── KeysUnavailable         503  the key file cannot be read, so no key can be accepted; comes with Retry-After
    ├── ShuttingDown            503  this gateway ends before the response is complete; comes with Retry-After
    ├── OutOfMemory             503  the engine has no memory for this request
    └── DeadlineExceeded        504  the engine stopped the request at its deadline
        └── EngineSilent        504  the engine sent nothing for too long

What no other try of the same request changes comes with ``x-should-retry: false`` where clients would try again otherwise: OpenAI's
SDK repeats requests after the status codes 408, 409, 429 and from 500 on.

A message is for a person: it states the problem and the remedy. It contains no path, no traceback and no secret.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from yardstick_llm.engine import wire


class ErrorDetail(msgspec.Struct, frozen=True):
    """Details of an error."""

    message: str
    """The problem and the remedy, for a person."""
    type: str
    """Family of the error, for example `invalid_request_error`."""
    param: str | None
    """Field of the request that caused the error, for example `items[3]`."""
    code: str | None
    """Fixed identifier for programs, for example `model_not_found`."""


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every unsuccessful response, and data of the event that ends a broken stream."""

    error: ErrorDetail


class GatewayError(Exception):
    """Base of all errors that a client sees."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    permanent: ClassVar[bool] = False
    """Whether no other try of the same request changes the answer, unless it has a ``retry_after``."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None, retryable: bool = False
    ) -> None:
        """``retry_after``: seconds, for the client; infinite if no wait helps. ``retryable``: another replica may answer the same
        request."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.retryable = retryable

    @property
    def body(self) -> ErrorBody:
        """The error in OpenAI's format."""
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds if waiting may help, and OpenAI's header in milliseconds, which its SDK prefers; else
        a header against retries."""
        if self.retry_after is None or math.isinf(self.retry_after):
            return {"x-should-retry": "false"} if self.permanent else {}
        milliseconds = max(1, math.ceil(self.retry_after * 1000))
        return {"retry-after": str(max(1, math.ceil(self.retry_after))), "retry-after-ms": str(milliseconds)}


class InvalidRequest(GatewayError):
    status = 400
    type = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(GatewayError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class KeyExpired(Unauthorized):
    code = "api_key_expired"


class Forbidden(GatewayError):
    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class NotPermitted(Forbidden):
    code = "not_permitted"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class AdapterNotFound(ModelNotFound):
    pass


class ResponseNotFound(NotFound):
    code = "response_not_found"


class CatalogueNotFound(NotFound):
    code = "catalogue_not_found"


class ItemNotFound(NotFound):
    code = "item_not_found"


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(GatewayError):
    status = 408
    type = "timeout_error"
    code = "request_timeout"


class Conflict(GatewayError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"
    permanent = True


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"
    permanent = True


class UnsupportedMediaType(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class UnsupportedEncoding(UnsupportedMediaType):
    code = "unsupported_content_encoding"

    @property
    def headers(self) -> dict[str, str]:
        """The supported content codings, as RFC 9110 15.5.16 requires."""
        return {"accept-encoding": "identity"}


class Misdirected(GatewayError):
    status = 421
    type = "invalid_request_error"
    code = "host_not_allowed"


class HeadersTooLarge(GatewayError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class Overloaded(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class RateLimited(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    permanent = True


class ClientGone(GatewayError):
    status = 499
    type = "invalid_request_error"
    code = "client_closed_request"


class InternalError(GatewayError):
    code = "internal_error"


class NotANumber(GatewayError):
    """The model's numbers overflow for one prompt. No other try changes that."""

    code = "not_a_number"
    permanent = True


class EngineLost(GatewayError):
    status = 502
    code = "engine_lost"


class NotReady(GatewayError):
    status = 503
    code = "not_ready"


class UnusableModel(NotReady):
    code = "unusable_model"


class StoreUnavailable(GatewayError):
    status = 503
    code = "store_unavailable"


class StoreFull(GatewayError):
    status = 413
    code = "store_full"
    permanent = True


class KeysUnavailable(GatewayError):
    status = 503
    code = "keys_unavailable"


class ShuttingDown(GatewayError):
    status = 503
    code = "server_shutting_down"

    def __init__(self) -> None:
        super().__init__("This gateway is shutting down and ended the request; send it again.", retry_after=1)


class OutOfMemory(GatewayError):
    status = 503
    code = "out_of_memory"


class DeadlineExceeded(GatewayError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineSilent(DeadlineExceeded):
    pass


# --- errors of engines and of the web framework as errors of the gateway

_ERROR_OF_CODE: dict[wire.ErrorCode, type[GatewayError]] = {
    "invalid": InvalidRequest,
    "unauthorized": InternalError,
    "unknown_adapter": AdapterNotFound,
    "overloaded": Overloaded,
    "not_ready": NotReady,
    "deadline": DeadlineExceeded,
    "aborted": EngineLost,
    "out_of_memory": OutOfMemory,
    "not_a_number": NotANumber,
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
