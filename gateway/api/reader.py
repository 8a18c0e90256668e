"""Converts request bodies to token ids, on the event loop or in a worker process.

The event loop reads bodies without text, whose prompts are token ids, if they are short. Worker processes read all texts and long
bodies (``gateway/workers/workers.py``).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from litestar import Request, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp, Receive, Scope, Send

from yardstick_llm.gateway.api.access import Quotas
from yardstick_llm.gateway.api.answers import while_connected
from yardstick_llm.gateway.api.openapi import ERRORS, WRITE_ERRORS, ApiOperation, operation_with
from yardstick_llm.gateway.errors import ContextExceeded, GatewayError, InternalError, InvalidRequest, NotReady
from yardstick_llm.gateway.http.body import Body, HttpMiddleware
from yardstick_llm.gateway.http.context import AnyRequest, RequestContext
from yardstick_llm.gateway.images.decode import InvalidImage
from yardstick_llm.gateway.images.fetch import ImageFetcher, ImageRoom
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import stage
from yardstick_llm.gateway.output.answer import Formats
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.requests.images import IMAGE_CHARACTERS
from yardstick_llm.gateway.requests.worker import ENDPOINTS, NAMES
from yardstick_llm.gateway.schemas.parameters import Parameters
from yardstick_llm.gateway.text.prepared import Bounds, Packed, Prepared, unpack
from yardstick_llm.gateway.workers.messages import Broken, Decode, Decoded, Fetched, Job, Read, Refused, Wanted
from yardstick_llm.gateway.workers.workers import BULK, Channel, Loss, WorkerLostError, Workers


def post_json(path: str | Sequence[str], tag: str, *, example: object = None) -> HTTPRouteHandler:
    """Return ``litestar.post`` for a handler whose ``data`` is a :class:`Body`. The content type is not checked. ``example``: an
    example of the body; by default that of its struct."""
    return _with_body(post, path, tag, ERRORS, ApiOperation if example is None else operation_with(example))


def put_json(path: str, tag: str) -> HTTPRouteHandler:
    """:func:`post_json` for ``litestar.put``."""
    return _with_body(put, path, tag, ERRORS | WRITE_ERRORS, ApiOperation)


def _with_body(
    method: type[post | put], path: str | Sequence[str], tag: str, errors: dict[int, ResponseSpec], operation: type[ApiOperation]
) -> HTTPRouteHandler:
    return method(path, status_code=200, responses=errors, operation_class=operation, tags=[tag], middleware=[_CallHandler()])


class _CallHandler(HttpMiddleware):
    """Calls the handler with the request, the body and the parameters in the path, and sends its response. The framework's way from
    here to the handler and back takes a third of the time that all layers take for a handler that does nothing.

    The body arrives in one message, because :class:`gateway.http.body.InFlightLimit` has read it.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:  # noqa: ARG002 - the last one
        """Answer a request."""
        request: AnyRequest = Request(scope, receive, send)
        message: Any = await receive()
        response = await scope["route_handler"].fn(request=request, data=Body(message["body"]), **scope["path_params"])
        await response.to_asgi_response(None, request)(scope, receive, send)


INLINE_BYTES = 32 << 10
"""Largest body that is decoded on the event loop, which takes at most 0.3 ms."""
PART_BYTES = 1 << 16
"""Bytes of a stored conversation that are sent to a worker at a time."""
LARGE_ANSWER = 1 << 18
"""Size of a worker's answer, in bytes, above which the event loop serves others before and after unpacking it."""
QUICK_SECONDS, SLOW_SECONDS = 0.25, 1.0
"""Time of a job in a worker below which its fields count as quick, and longest time of a job that is not bulk: it begins again as
one. A busy machine makes quick jobs a few times slower."""
KEPT_FIELDS, KEPT_TENANTS = 256, 1024
"""Most quick fields that are remembered of one tenant, those of one request being one, and most tenants."""

T = TypeVar("T", bound=Parameters)


@dataclass(frozen=True)
class Reader:
    """Decodes requests and converts their prompts to token ids."""

    workers: Workers
    bounds: Bounds
    telemetry: Telemetry
    text_seconds: float
    """Longest time of one step in a worker; the worker is killed after it."""
    job_mib: int
    """Memory limit of one job in a worker, in MiB."""
    fetcher: ImageFetcher
    image_room: ImageRoom
    quotas: Quotas
    formats: Mapping[str, Formats] = field(default_factory=dict)
    """Formats of answers that the settings choose, by model."""
    quick: QuickFields = field(default_factory=lambda: QuickFields())
    """Fields whose jobs are not bulk, although their cost is not bounded by their size."""

    async def body(self, request: AnyRequest, kind: type[T], body: Body[T]) -> Reading[T]:
        """Decode ``body``, and let its ``timeout`` begin. Raises :class:`GatewayError`, such as :class:`InvalidRequest`."""
        name, content, context, decoded = NAMES[kind], body.content, RequestContext.of(request), None
        endpoint: Endpoint[T] = ENDPOINTS[name]
        if len(content) <= INLINE_BYTES:
            fields, ignored = endpoint.decode(content)
        else:
            async with while_connected(request.scope):
                with stage("gateway.decode"):
                    await self.quotas.reserve(request)
                    decoded = await self.decode(request, name, content)
            fields, ignored = endpoint.unpack_fields(decoded.fields), decoded.ignored
        if ignored:
            context.name_ignored(ignored)
        if fields.timeout is not None:
            context.limits.end_within(fields.timeout)
        return Reading(fields, endpoint, name, content, decoded, self, request)

    async def decode(self, request: AnyRequest, name: str, body: bytes) -> Decoded:
        """Decode a body in a worker. If that ends unexpectedly, another one tries once. Raises :class:`GatewayError`."""
        for last in (False, True):
            try:
                async with self._worker(request, len(body), bulk=len(body) > BULK) as channel:
                    decoded = await self._ask(channel, Decode(name), [body], bulk=True)
                break
            except NotReady:
                if last:
                    raise
        assert isinstance(decoded, Decoded)
        return decoded

    async def read(self, request: AnyRequest, job: Read, body: Sequence[bytes], size: int, unbounded: bytes) -> Prepared:
        """Read a request in a worker, and fetch the images that it names. ``unbounded``: as :meth:`Endpoint.unbounded` returns it.
        Raises :class:`GatewayError`."""
        context = RequestContext.of(request)
        fields = Fields(context.tenant.id, job.text, unbounded) if unbounded else None
        prepared = await self._read(request, job, body, size, fields)
        if isinstance(prepared, Wanted):
            wanted = prepared.urls
            self.fetcher.check(wanted)
            # the least that the request may cost: each image has a token
            await self.quotas.reserve(request, tokens=len(wanted), items=ENDPOINTS[job.endpoint].least_items, fetches=True)
            with self.image_room.receiving(context.tenant) as take:
                with stage("gateway.fetch"):
                    contents = await self.fetcher.fetch_all(wanted, context.tenant, take)
                job = msgspec.structs.replace(job, fetched=[Fetched(url, len(content)) for url, content in contents.items()])
                parts = [part for content in contents.values() for part in _sliced(content)]
                whole = max(size, IMAGE_CHARACTERS) + sum(map(len, parts))
                prepared = await self._read(request, job, [*body, *parts], whole, None)
                del contents, parts
            assert isinstance(prepared, Prepared)
        if prepared.images:
            self.image_room.hold(context, sum(len(image.pixels) for image in prepared.images))
        return prepared

    async def _read(
        self, request: AnyRequest, job: Read, body: Sequence[bytes], size: int, fields: Fields | None
    ) -> Prepared | Wanted:
        """Read in a worker. If it ends unexpectedly, another one tries once, among those for bulk jobs: large ones, and those with
        fields whose cost is not bounded by their size and not known to be small."""
        bulk = size > BULK or (fields is not None and fields not in self.quick)
        try:
            return await self._read_once(request, job, body, size, fields, bulk=bulk)
        except (NotReady, _TooSlow):
            return await self._read_once(request, job, body, size, fields, bulk=True)

    async def _read_once(
        self, request: AnyRequest, job: Read, body: Sequence[bytes], size: int, fields: Fields | None, *, bulk: bool
    ) -> Prepared | Wanted:
        """Read in one worker, unpack the prompts, and remember whether ``fields`` are quick. Raises :class:`GatewayError`;
        :class:`_TooSlow` for a job that takes too long for one that is not ``bulk``."""
        async with self._worker(request, size, bulk=bulk) as channel:
            began, seconds = time.perf_counter(), math.inf
            try:
                packed = await self._ask(channel, job, body, bulk=bulk)
                seconds = time.perf_counter() - began
            finally:
                if fields is not None:
                    self.quick.note(fields, seconds)
        if isinstance(packed, Wanted):
            return packed
        assert isinstance(packed, Packed)
        pixels = sum(len(image.pixels) for image in packed.images)
        self.telemetry.images.read(len(packed.images), pixels)
        if len(packed.ids) + len(packed.response) + pixels > LARGE_ANSWER:
            await asyncio.sleep(0)
        return await unpack(packed)

    def _worker(self, request: AnyRequest, size: int, *, bulk: bool) -> AbstractAsyncContextManager[Channel]:
        """Return a worker for a request of ``size`` bytes, fair between API keys, or client addresses on a server without keys.
        Raises :class:`Overloaded`."""
        key = RequestContext.of(request).key
        tenant, weight = (key.id, key.weight) if key is not None else (str(request.scope.get("client")), 1.0)
        return self.workers.job(tenant=tenant, weight=weight, size=size, bulk=bulk)

    async def _ask(self, channel: Channel, job: Job, body: Sequence[bytes], *, bulk: bool) -> msgspec.Struct:
        """Return the worker's answer to ``job``. Raises :class:`GatewayError`; :class:`NotReady` if another worker may succeed, and
        :class:`_TooSlow`."""
        began = time.perf_counter()
        seconds = self.text_seconds if bulk else min(self.text_seconds, SLOW_SECONDS)
        try:
            answer = await channel.ask(job, body, seconds=seconds)
        except WorkerLostError as error:
            if error.loss == "slow" and seconds < self.text_seconds:
                self.telemetry.text.ended.labels("moved").inc()
                raise _TooSlow from None
            self.telemetry.text.ended.labels(error.loss).inc()
            raise self._lost(error.loss) from None
        finally:
            self.telemetry.text.seconds.observe(time.perf_counter() - began)
        if isinstance(answer, Refused):
            if answer.image_reason is not None:
                self.telemetry.images.refused.labels(answer.image_reason).inc()
                raise InvalidImage(answer.message, param=answer.param, reason=answer.image_reason)
            refusal = ContextExceeded if answer.code == ContextExceeded.code else InvalidRequest
            raise refusal(answer.message, param=answer.param)
        if isinstance(answer, Broken):
            if answer.reason == "fault":
                raise InternalError("An internal error occurred while the server read the request.")
            raise self._lost("memory" if answer.reason == "memory" else "crash")
        return answer

    def _lost(self, loss: Loss) -> GatewayError:
        """Return the client's error for a worker that ended."""
        if loss == "slow":
            return InvalidRequest(f"Reading this request took longer than {self.text_seconds:g} s; send less text at once.")
        if loss == "template":
            limit = f"{self.bounds.template_seconds:g} s"
            return InvalidRequest(f"The chat template took longer than {limit} with these messages; send fewer.", param="messages")
        if loss == "memory":
            return InvalidRequest(f"Reading this request needs more than {self.job_mib} MiB of memory; send less at once.")
        return NotReady("The process that read the request has ended; try again.", retry_after=1)


@dataclass
class Reading(Generic[T]):
    """A decoded request, which can be read for a model. It holds no worker."""

    fields: T
    """The request. If a worker decoded it, the fields in the endpoint's ``bulk`` hold stand-ins."""
    endpoint: Endpoint[T]
    name: str
    """The endpoint's, for workers."""
    body: bytes
    decoded: Decoded | None
    """The fields of a long body, as a worker decoded them."""
    reader: Reader
    request: AnyRequest

    async def read(self, served: ServedModel, earlier: bytes = b"") -> Prepared:
        """Return the prompts as token ids. ``earlier``: what the request needs besides its body, see :class:`Model`. Raises
        :class:`GatewayError`."""
        reader, cuttable = self.reader, served.tokenizer.table.cuttable
        with stage("gateway.read"):
            if (decoded := self.decoded) is not None:
                characters, unbounded = decoded.characters_cut if cuttable else decoded.characters, decoded.unbounded
            elif self.endpoint.is_light(self.fields):
                return self.endpoint.read(self.fields, Model(served.facts, served.tokenizer, reader.bounds))
            else:
                characters, unbounded = self.endpoint.characters(self.fields, cuttable), self.endpoint.unbounded(self.fields)
            formats = reader.formats.get(served.base.name, Formats())
            job = Read(self.name, served.text, served.facts, reader.bounds, formats, len(earlier))
            size = max(len(self.body), characters) + len(earlier)
            async with while_connected(self.request.scope):
                if decoded is None:
                    await reader.quotas.reserve(self.request)
                return await reader.read(self.request, job, [self.body, *_sliced(earlier)], size, unbounded)


class _TooSlow(Exception):
    """A job that is not bulk took :data:`SLOW_SECONDS`."""


class Fields(NamedTuple):
    """Fields of a request whose cost is not bounded by their size, such as schemas."""

    tenant: str | None
    text: str
    """Key of the model's tokeniser and template."""
    digest: bytes


class QuickFields:
    """The fields that a worker last read quickly. Each tenant has its own, so that none learns or displaces those of others."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str | None, OrderedDict[Fields, None]] = OrderedDict()

    def __contains__(self, fields: Fields) -> bool:
        return fields in self._tenants.get(fields.tenant, ())

    def note(self, fields: Fields, seconds: float) -> None:
        """Record the time that a worker took; infinite if it gave no result."""
        known = self._tenants.setdefault(fields.tenant, OrderedDict())
        if seconds < QUICK_SECONDS or (seconds < SLOW_SECONDS and fields in known):
            known[fields] = None
            known.move_to_end(fields)
        else:
            known.pop(fields, None)
        self._tenants.move_to_end(fields.tenant)
        for kept, most in ((known, KEPT_FIELDS), (self._tenants, KEPT_TENANTS)):
            if len(kept) > most:
                kept.popitem(last=False)


def _sliced(data: bytes) -> list[bytes]:
    """Cut ``data`` into parts that are sent one by one. They share the memory of ``data``."""
    view = cast(bytes, memoryview(data))  # a socket takes it
    return [view[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
