"""Access of a client to models: a key may be restricted to some of them."""

from __future__ import annotations

from litestar.connection import ASGIConnection

from gateway.context import RequestContext
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel


def visible_models(connection: ASGIConnection, pool: Pool) -> list[ServedModel]:  # type: ignore[type-arg]
    """Return the models that the client may use."""
    allowed = _allowed(connection)
    return [model for model in pool.models if allowed is None or model.name in allowed]


def requested_model(connection: ASGIConnection, pool: Pool, name: str | None) -> ServedModel:  # type: ignore[type-arg]
    """Return the model called ``name``; None means the only model that the client may use. A model that the client may not use is
    reported as unknown. The model's name is recorded in the account of the request's context.

    Raises :class:`ModelNotFound`, :class:`InvalidRequest`, :class:`NotReady`.
    """
    model = _requested_model(connection, pool, name)
    RequestContext.of(connection).account.model = model.name
    return model


def _requested_model(connection: ASGIConnection, pool: Pool, name: str | None) -> ServedModel:  # type: ignore[type-arg]
    allowed = _allowed(connection)
    if allowed is None:
        return pool.model(name)
    if name is None and len(allowed) > 1:
        raise InvalidRequest(f"This key may use several models; set `model` to one of {_listed(allowed)}.", param="model")
    asked = allowed[0] if name is None else name
    try:
        if asked in allowed:
            return pool.model(asked)
    except ModelNotFound:  # its message would name models that this key may not use
        pass
    message = f"The model {asked!r} does not exist, or this key may not use it; the key is for {_listed(allowed)}."
    raise ModelNotFound(message, param="model")


def _allowed(connection: ASGIConnection) -> list[str] | None:  # type: ignore[type-arg]
    key = RequestContext.of(connection).key
    return None if key is None else key.models


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
