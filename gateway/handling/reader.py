"""Converts request bodies to token ids, on the event loop or in a worker process.

The event loop reads requests that take it less than about a millisecond: short bodies whose prompts are token ids, and short texts
whose work is bounded (``gateway/text/small.py``). Worker processes read all other texts, chat templates and long bodies
(``gateway/workers/workers.py``).
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from litestar import Request

from gateway.admission.quotas import Quotas
from gateway.errors import ContextExceeded, GatewayError, InternalError, InvalidRequest, NotReady
from gateway.handling.body import Body
from gateway.handling.streams import while_connected
from gateway.http.context import RequestContext
from gateway.images.errors import InvalidImage
from gateway.images.fetch import ImageFetcher
from gateway.images.room import ImageRoom
from gateway.ops.metrics import Telemetry
from gateway.ops.tracing import stage
from gateway.pool.replica import ServedModel
from gateway.reading.endpoint import Endpoint, Model, TextSide
from gateway.reading.endpoints import ENDPOINTS, NAMES
from gateway.reading.images import IMAGE_CHARACTERS
from gateway.schemas.parameters import Parameters
from gateway.text.bounds import Bounds, NeedsWorker
from gateway.text.prepared import Packed, Prepared, unpack, unpack_large
from gateway.tools.formats import Formats
from gateway.workers.channel import Channel, Loss, WorkerLostError
from gateway.workers.messages import Broken, Decode, Decoded, Fetched, Job, Read, Refused, Wanted, Whole
from gateway.workers.workers import BULK, Workers

INLINE_BYTES = 32 << 10
"""Largest body that is decoded on the event loop, which takes at most 0.3 ms."""
SMALL_BYTES = 4 << 10
"""Largest body whose texts the event loop reads. A chat takes some 0.05 ms, five documents take 0.1 to 0.2 ms, and a
hostile template and text at most 2 ms."""
SMALL_TOKENS = 1 << 14
"""Most tokens of all prompts of a short request. Where items come first, an instruction before each document counts each time."""
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


class Reading(ABC, Generic[T]):
    """A decoded request."""

    fields: T
    """The request. If a worker decoded it, the fields in the endpoint's ``bulk`` hold stand-ins."""

    @abstractmethod
    async def read(self, served: ServedModel, earlier: bytes = b"") -> Prepared:
        """Return the prompts as token ids. ``earlier``: what the request needs besides its body, see :class:`Model`. Raises
        :class:`GatewayError`."""


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

    def open(self, request: Request[Any, Any, Any], kind: type[T], body: Body[T]) -> AbstractAsyncContextManager[Reading[T]]:
        """Decode the request in ``body``. The block may hold a worker; leave it once the prompts are read.

        Raises :class:`GatewayError`, such as :class:`InvalidRequest` and :class:`ClientGone`.
        """
        if len(body.content) > INLINE_BYTES:
            return self._open_long(request, NAMES[kind], body)
        endpoint: Endpoint[T] = ENDPOINTS[NAMES[kind]]
        fields, ignored = endpoint.decode(body.content)
        context = RequestContext.of(request)
        if ignored:
            context.name_ignored(ignored)
        if fields.timeout is not None:
            context.limits.end_within(fields.timeout)
        return _Short(self, request, endpoint, fields, body.content)

    def without_worker(self, request: Request[Any, Any, Any], fields: T) -> Reading[T]:
        """Return a reading of ``fields`` that holds no worker, so it can be used at any time and repeatedly."""
        return _Short(self, request, ENDPOINTS[NAMES[type(fields)]], fields, msgspec.json.encode(fields))

    @asynccontextmanager
    async def _open_long(self, request: Request[Any, Any, Any], name: str, body: Body[T]) -> AsyncIterator[Reading[T]]:
        async with while_connected(request.scope), AsyncExitStack() as held:
            long = _Long(self, request, name, body, held)
            with stage("gateway.decode"):
                await long.decode()
            try:
                yield long
            finally:
                del long.channel  # the worker belongs to other requests from here on

    async def read_whole(
        self, request: Request[Any, Any, Any], body: Sequence[bytes], size: int, job: Whole, unbounded: bytes
    ) -> Prepared:
        """Charge a request, decode and read it in a worker, and fetch the images that it names. ``unbounded``: as
        :meth:`Endpoint.unbounded` returns it. Raises :class:`GatewayError`."""
        async with while_connected(request.scope):
            await self.quotas.reserve(request)
            fields = self.fields(request, job.read.text, unbounded)
            read = await self.in_worker(request, body, size, job, fields)
            if isinstance(read, Wanted):
                return await self.read_fetched(request, body, size, job, read)
            return self.held(request, read)

    def fields(self, request: Request[Any, Any, Any], text: str, unbounded: bytes) -> Fields | None:
        """Return the key of a request's fields in :attr:`quick`; None if the cost of all is bounded by their size."""
        return Fields(RequestContext.of(request).tenant.id, text, unbounded) if unbounded else None

    def is_bulk(self, size: int, fields: Fields | None) -> bool:
        """Whether a job is large, or has fields whose cost is not bounded by their size and not known to be small."""
        return size > BULK or (fields is not None and fields not in self.quick)

    def held(self, request: Request[Any, Any, Any], prepared: Prepared) -> Prepared:
        """Return ``prepared`` with room for its images until the end of the request. Raises :class:`Overloaded`."""
        self.image_room.hold(RequestContext.of(request), sum(len(image.pixels) for image in prepared.images))
        return prepared

    async def read_fetched(
        self, request: Request[Any, Any, Any], body: Sequence[bytes], size: int, job: Whole, wanted: Wanted
    ) -> Prepared:
        """Fetch images, without a worker, and read the request with them. Raises :class:`GatewayError`."""
        tenant = RequestContext.of(request).tenant
        self.fetcher.check(wanted.urls)
        # the least that the request may cost: each image has a token
        await self.quotas.reserve(request, tokens=len(wanted.urls), items=ENDPOINTS[job.endpoint].least_items, fetches=True)
        with self.image_room.receiving(tenant) as take:
            with stage("gateway.fetch"):
                contents = await self.fetcher.fetch_all(wanted.urls, tenant, take)
            fetched = [Fetched(url, len(content)) for url, content in contents.items()]
            whole = msgspec.structs.replace(job, read=msgspec.structs.replace(job.read, fetched=fetched))
            parts = [part for content in contents.values() for part in _sliced(content)]
            read = await self.in_worker(request, [*body, *parts], max(size, IMAGE_CHARACTERS) + sum(map(len, parts)), whole)
            del contents, parts
        assert isinstance(read, Prepared)
        return self.held(request, read)

    async def in_worker(
        self, request: Request[Any, Any, Any], body: Sequence[bytes], size: int, job: Whole, fields: Fields | None = None
    ) -> Prepared | Wanted:
        """Read in a worker. If it ends unexpectedly, another one tries once, among those for bulk jobs."""
        try:
            return await self.read_once(request, body, size, job, fields, bulk=self.is_bulk(size, fields))
        except (NotReady, _TooSlow):
            return await self.read_once(request, body, size, job, fields, bulk=True)

    async def read_once(
        self, request: Request[Any, Any, Any], body: Sequence[bytes], size: int, job: Whole, fields: Fields | None, *, bulk: bool
    ) -> Prepared | Wanted:
        """Read in one worker. Raises what :meth:`prepared` raises."""
        async with self.worker(request, size, bulk=bulk) as channel:
            return await self.prepared(channel, job, body, fields, bulk=bulk)

    async def prepared(
        self, channel: Channel, job: Job, body: Sequence[bytes], fields: Fields | None, *, bulk: bool
    ) -> Prepared | Wanted:
        """Have a worker read the prompts, unpack them, and remember whether ``fields`` are quick. Raises :class:`GatewayError`;
        :class:`_TooSlow` for a job that takes too long for one that is not ``bulk``."""
        began, seconds = time.perf_counter(), math.inf
        try:
            packed = await self.ask(channel, job, body, bulk=bulk)
            seconds = time.perf_counter() - began
        finally:
            if fields is not None:
                self.quick.note(fields, seconds)
        if isinstance(packed, Wanted):
            return packed
        assert isinstance(packed, Packed)
        self.telemetry.images.read(packed.images)
        pixels = sum(len(image.pixels) for image in packed.images)
        if len(packed.ids) + len(packed.response) + 64 * len(packed.lengths) + pixels <= LARGE_ANSWER:
            return unpack(packed)
        await asyncio.sleep(0)
        return await unpack_large(packed)

    def order(self, served: ServedModel, earlier: bytes) -> Read:
        """Return the message that asks a worker to read a request for ``served``."""
        return Read(served.text, served.facts, self.bounds, self.formats.get(served.base.name, Formats()), len(earlier))

    def model(self, served: ServedModel, texts: TextSide) -> Model:
        """Return the model that the event loop reads a short text for."""
        return Model(served.facts, served.tokenizer, self._small_bounds, texts, self.formats.get(served.base.name, Formats()))

    @cached_property
    def _small_bounds(self) -> Bounds:
        return msgspec.structs.replace(self.bounds, max_request_tokens=min(self.bounds.max_request_tokens, SMALL_TOKENS))

    def worker(self, request: Request[Any, Any, Any], size: int, *, bulk: bool) -> AbstractAsyncContextManager[Channel]:
        """Return a worker for a request of ``size`` bytes. Raises :class:`Overloaded`."""
        tenant, weight = _tenant(request)
        return self.workers.job(tenant=tenant, weight=weight, size=size, bulk=bulk)

    async def ask(self, channel: Channel, job: Job, body: Sequence[bytes] = (), *, bulk: bool = True) -> msgspec.Struct:
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
            raise self._broken(answer)
        return answer

    def _broken(self, broken: Broken) -> GatewayError:
        if broken.reason == "memory":
            return self._lost("memory")
        if broken.reason == "unknown_text":
            return self._lost("crash")
        return InternalError("An internal error occurred while the server read the request.")

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


@dataclass(slots=True)
class _Short(Reading[T], AbstractAsyncContextManager[Reading[T]]):
    """A request that was decoded on the event loop. It holds no worker."""

    reader: Reader
    request: Request[Any, Any, Any]
    endpoint: Endpoint[T]
    fields: T
    body: bytes

    async def __aenter__(self) -> Reading[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def read(self, served: ServedModel, earlier: bytes = b"") -> Prepared:
        with stage("gateway.read"):
            if self.endpoint.is_light(self.fields):
                return self.endpoint.read(self.fields, Model(served.facts, served.tokenizer, self.reader.bounds))
            if len(self.body) <= SMALL_BYTES and not earlier and (prepared := self._read_small(served)) is not None:
                return prepared
            characters = self.endpoint.characters(self.fields, served.tokenizer.table.cuttable)
            job = Whole(NAMES[self.endpoint.kind], self.reader.order(served, earlier))
            size = max(len(self.body), characters) + len(earlier)
            unbounded = self.endpoint.unbounded(self.fields)
            return await self.reader.read_whole(self.request, [self.body, *_sliced(earlier)], size, job, unbounded)

    def _read_small(self, served: ServedModel) -> Prepared | None:
        """Read a short text; None if a worker has to, which also decides what is wrong with a request."""
        small = served.tokenizer.small
        if small is None:
            return None
        texts = TextSide(small.tokenizer, small.template, small.preset)
        small.begin()
        try:
            if not self.endpoint.is_small(self.fields):
                return None
            prepared = self.endpoint.read(self.fields, self.reader.model(served, texts))
        except (NeedsWorker, InvalidRequest):
            return None
        self.reader.telemetry.text.small.inc()
        return prepared


@dataclass(slots=True)
class _Long(Reading[T]):
    """A request that a worker has decoded and keeps. If that worker ends unexpectedly, another one starts again, once for each
    step."""

    reader: Reader
    request: Request[Any, Any, Any]
    name: str
    body: Body[T]
    held: AsyncExitStack
    """Exit stack that holds the worker."""
    channel: Channel = field(init=False)
    fields: T = field(init=False)
    decoded: Decoded = field(init=False)

    async def decode(self) -> None:
        """Charge the request, decode its body in a worker, and set ``fields``. Raises :class:`GatewayError`."""
        await self.reader.quotas.reserve(self.request)
        job = Decode(self.name)
        try:
            decoded = await self.reader.ask(await self._new_worker(), job, [self.body.content])
        except NotReady:
            decoded = await self.reader.ask(await self._new_worker(), job, [self.body.content])
        assert isinstance(decoded, Decoded)
        self.decoded = decoded
        context = RequestContext.of(self.request)
        context.name_ignored(decoded.ignored)
        self.fields = ENDPOINTS[self.name].unpack_fields(decoded.fields)
        if self.fields.timeout is not None:
            context.limits.end_within(self.fields.timeout)

    async def read(self, served: ServedModel, earlier: bytes = b"") -> Prepared:
        order = self.reader.order(served, earlier)
        body, whole = [self.body.content, *_sliced(earlier)], Whole(self.name, order)
        size = len(self.body.content) + len(earlier)
        fields = self.reader.fields(self.request, served.text, self.decoded.unbounded)
        characters = self.decoded.characters_cut if served.tokenizer.table.cuttable else self.decoded.characters
        with stage("gateway.read"):
            bulk = len(self.body.content) > BULK
            if not bulk and self.reader.is_bulk(max(size, characters), fields):
                await self.held.aclose()  # this worker is not one of those for such requests
                read = await self.reader.in_worker(self.request, body, max(size, characters), whole, fields)
            else:
                try:
                    read = await self.reader.prepared(self.channel, order, body[1:], fields, bulk=bulk)
                except (NotReady, _TooSlow):
                    await self.held.aclose()
                    read = await self.reader.read_once(self.request, body, size, whole, fields, bulk=True)
            if isinstance(read, Prepared):
                return self.reader.held(self.request, read)
            await self.held.aclose()
            return await self.reader.read_fetched(self.request, body, size, whole, read)

    async def _new_worker(self) -> Channel:
        """Replace the worker by a new one."""
        await self.held.aclose()
        size = len(self.body.content)
        self.channel = await self.held.enter_async_context(self.reader.worker(self.request, size, bulk=size > BULK))
        return self.channel


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


def _tenant(request: Request[Any, Any, Any]) -> tuple[str, float]:
    """Return the tenant in the fair queue and its weight: the API key, or the client's address on a server without keys."""
    key = RequestContext.of(request).key
    if key is not None:
        return key.id, key.weight
    return str(request.scope.get("client")), 1.0
