"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, for keys with ``admin``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from yardstick_llm.gateway.api.access import Quotas
from yardstick_llm.gateway.api.answers import JsonResponse
from yardstick_llm.gateway.api.reader import post_json
from yardstick_llm.gateway.errors import BodyTooLarge, ModelNotFound, NotPermitted
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest, RequestContext
from yardstick_llm.gateway.pool.adapters import Reference
from yardstick_llm.gateway.pool.loading import AdapterManager, Outcome
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.schemas.parameters import BodyDecoder, EndpointName, Parameters

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Failure(msgspec.Struct, frozen=True):
    """An engine on which an operation failed."""

    engine: str
    """Its URL."""
    message: str
    """The problem and its remedy, for a person."""


class LoadAdapterRequest(Parameters, kw_only=True):
    """Load a LoRA adapter on all engines of a model."""

    endpoint: ClassVar[EndpointName] = "load_adapter"
    lora_name: Name
    """Name of the adapter for clients: 1 to 128 letters, digits, and `._-`."""
    lora_path: Path
    """Directory on the engines' machines, below their `--lora-root`."""
    load_inplace: bool = False
    """Whether to replace an adapter of this name that has other weights; otherwise that is an error."""
    model: Name | None = None
    """The model that the adapter is for; may be left out if only one is served."""


class UnloadAdapterRequest(Parameters, kw_only=True):
    """Unload a LoRA adapter from all engines of a model."""

    endpoint: ClassVar[EndpointName] = "unload_adapter"
    lora_name: Name
    """Name of the adapter, also as `base:adapter`."""
    model: Name | None = None
    """The model that the adapter is for; needed if several models have an adapter of this name."""


class AdapterOperation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of loading or unloading. The status is 200 if all engines succeeded, and 202 if the others will be tried again."""

    object: Literal["lora_adapter"] = "lora_adapter"
    id: str
    """Name of the adapter."""
    parent: str
    """Name of the model."""
    digest: str | None = None
    """Digest of the adapter's files; null after it was unloaded."""
    engines: int
    """Engines on which it was done."""
    failed: list[Failure]
    """Engines on which it failed."""


MOST_BYTES = 16 << 10
"""Largest body."""

T = TypeVar("T", bound=Parameters)

_load = BodyDecoder(LoadAdapterRequest)
_unload = BodyDecoder(UnloadAdapterRequest)


def adapter_routes(pool: Pool, manager: AdapterManager, quotas: Quotas) -> list[HTTPRouteHandler]:
    """Create the routes. An operation that has begun ends also if its client leaves."""
    running: set[asyncio.Task[Outcome]] = set()

    async def finished(work: Coroutine[Any, Any, Outcome]) -> Outcome:
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)
        return await asyncio.shield(task)

    @post_json("/v1/load_lora_adapter", "adapters")
    async def load(request: AnyRequest, data: JSONBody[Body[LoadAdapterRequest]]) -> Response[AdapterOperation]:
        """Load a LoRA adapter on all engines of a model, and on those that join later. Needs a key with `admin`.

        The answer comes when every engine has checked and loaded it. If none can, nothing changes.
        """
        fields = _read(request, data, _load)
        base = pool.model(fields.model).base.name
        await quotas.charge(request, tokens=0)
        outcome = await finished(manager.load(base, fields.lora_name, fields.lora_path, replace=fields.load_inplace))
        return _answer(Reference(base, fields.lora_name), outcome)

    @post_json("/v1/unload_lora_adapter", "adapters")
    async def unload(request: AnyRequest, data: JSONBody[Body[UnloadAdapterRequest]]) -> Response[AdapterOperation]:
        """Unload a LoRA adapter from all engines of a model. Needs a key with `admin`.

        Requests in progress end with its weights; new ones are answered 404.
        """
        fields = _read(request, data, _unload)
        reference = _named(pool, manager, fields)
        await quotas.charge(request, tokens=0)
        return _answer(reference, await finished(manager.unload(reference)))

    return [load, unload]


def _read(request: AnyRequest, body: Body[T], decoder: BodyDecoder[T]) -> T:
    """Return the request. Raises :class:`NotPermitted`, :class:`InvalidRequest`, :class:`BodyTooLarge`."""
    context = RequestContext.of(request)
    if context.key is not None and not context.key.admin:
        raise NotPermitted("This API key may not load or unload adapters; use one with `admin`.")
    if len(body.content) > MOST_BYTES:
        raise BodyTooLarge(f"The request body is larger than {MOST_BYTES} bytes.")
    fields, ignored = decoder.decode(body.content)
    context.name_ignored(ignored)
    return fields


def _named(pool: Pool, manager: AdapterManager, fields: UnloadAdapterRequest) -> Reference:
    """Return the adapter that a request to unload names. Raises :class:`ModelNotFound`, :class:`InvalidRequest`."""
    if fields.model is not None:
        return Reference(pool.model(fields.model).base.name, fields.lora_name)
    found = pool.adapters.reference(fields.lora_name)
    if found is None:
        pool.adapters.find(fields.lora_name)  # raises for a name that several models use
        remembered = [each for each in manager.known if fields.lora_name in (each.name, str(each))]
        if len(remembered) != 1:
            message = f"There is no adapter {fields.lora_name!r}; GET /v1/models lists them."
            raise ModelNotFound(message, param="lora_name")
        found = remembered[0]
    return found


def _answer(reference: Reference, outcome: Outcome) -> Response[AdapterOperation]:
    answer = AdapterOperation(
        id=reference.name,
        parent=reference.base,
        digest=None if outcome.adapter is None else outcome.adapter.digest,
        engines=len(outcome.done),
        failed=[Failure(replica.client.url, error.message) for replica, error in outcome.failed],
    )
    return JsonResponse(answer, status=202 if outcome.failed else 200)
