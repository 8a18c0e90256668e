"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.errors import ModelNotFound
from gateway.handling.access import visible_models
from gateway.handling.openapi import READ_ERRORS, ApiOperation
from gateway.pool.adapters import AdapterModel
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.presets.preset import Fitted
from gateway.schemas.models import Model, ModelList, PresetInfo


def model_routes(pool: Pool) -> list[HTTPRouteHandler]:
    """Create the routes."""

    @get("/v1/models", responses=READ_ERRORS, operation_class=ApiOperation, tags=["models"])
    async def list_models(request: Request[Any, Any, Any]) -> ModelList:
        """List the models that are served here and that the key may use."""
        return ModelList(data=[_described(name, model) for name, model in visible_models(request, pool).items()])

    @get("/v1/models/{model:path}", responses=READ_ERRORS, operation_class=ApiOperation, tags=["models"])
    async def show_model(request: Request[Any, Any, Any], model: FromPath[str]) -> Model:
        """Describe one model."""
        name = model.removeprefix("/")
        found = visible_models(request, pool).get(name)
        if found is None:
            raise ModelNotFound(f"The model {name!r} does not exist; GET /v1/models lists what is served.", param="model")
        return _described(name, found)

    return [list_models, show_model]


def _described(name: str, model: ServedModel) -> Model:
    return Model(
        id=name,
        root=str(model.reference) if isinstance(model, AdapterModel) else model.name,
        parent=model.base.name if isinstance(model, AdapterModel) else None,
        digest=model.adapter_digest or None,
        created=model.created,
        max_model_len=model.context,
        capabilities=list(model.info.capabilities),
        preset=_preset(model.tokenizer.table.fitted, fallback=model.preset_is_fallback),
        lenvm_gamma=model.info.lenvm_gamma,
    )


def _preset(fitted: Fitted | None, *, fallback: bool) -> PresetInfo | None:
    if fitted is None:
        return None
    preset = fitted.preset
    return PresetInfo(
        name=preset.name,
        task=preset.task,
        instruction=preset.instruction,
        labels=preset.flat_labels,
        activation=preset.activation,
        fallback=fallback,
    )
