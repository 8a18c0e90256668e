"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.errors import ModelNotFound
from gateway.openapi import ERRORS
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.schemas.models import Model, ModelList


def model_routes(pool: Pool) -> list[HTTPRouteHandler]:
    """The endpoints."""

    @get("/v1/models", responses=ERRORS, tags=["models"])
    async def list_models() -> ModelList:
        """List the models that are served here."""
        return ModelList(data=[_described(model) for model in pool.models])

    @get("/v1/models/{model:path}", responses=ERRORS, tags=["models"])
    async def show_model(model: FromPath[str]) -> Model:
        """Describe one model."""
        name = model.removeprefix("/")
        if name not in {served.name for served in pool.models}:
            raise ModelNotFound(f"The model {name!r} does not exist; GET /v1/models lists what is served.", param="model")
        return _described(pool.model(name))

    return [list_models, show_model]


def _described(model: ServedModel) -> Model:
    return Model(id=model.name, created=model.created, max_model_len=model.context, capabilities=list(model.info.capabilities))
