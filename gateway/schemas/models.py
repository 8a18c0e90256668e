"""Bodies of ``/v1/models``."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that engines serve."""

    id: str
    """The name to send as `model`."""
    object: Literal["model"] = "model"
    created: int
    """When the gateway first saw it, in seconds since 1970."""
    owned_by: str = "yardstick"
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    capabilities: list[str]
    """What it can do: `score`, `generate`, `guide` (`length_guidance` and `/v1/length`)."""
    length_gamma: float | None = None
    """The discount of its length model, where it has one."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that engines serve."""

    object: Literal["list"] = "list"
    data: list[Model]
