"""Bodies of ``/v1/models``."""

from __future__ import annotations

from typing import Literal

import msgspec


class PresetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The preset of a model; `yardstick presets NAME` prints a whole one."""

    name: str
    task: Literal["rerank", "classify", "embed"]
    """The endpoint that it serves."""
    instruction: str
    """Default instruction; empty if there is none."""
    labels: list[str]
    """Tokens that are read; empty for a model with a head of its own."""
    activation: Literal["softmax", "sigmoid", "difference", "none"]
    """The score from what is read: a probability (`softmax`, `sigmoid`), or logits."""
    fallback: bool = False
    """Whether it prompts the model because no preset is for the model's name. A model that was trained with another prompt needs
    another preset."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model or an adapter that engines serve."""

    id: str
    """The name to send as `model`."""
    root: str
    """Name of the model that answers; differs from `id` for an alias. For an adapter: `base:adapter`."""
    parent: str | None = None
    """Name of the model that an adapter changes; null for a model."""
    digest: str | None = None
    """Digest of an adapter's files; null for a model."""
    object: Literal["model"] = "model"
    created: int
    """Time at which the gateway first saw the model, in seconds since 1970."""
    owned_by: str = "yardstick"
    max_model_len: int
    """Largest number of prompt and completion tokens together."""
    capabilities: list[str]
    """Supported operations: `score`, `generate`, `classify`, `embed`, `length_guidance` (the request field and `/v1/length`)."""
    preset: PresetInfo | None = None
    """How the model is prompted and read by `/v1/rerank`, `/v1/classify` or `/v1/embeddings`; null if it serves none of these."""
    lenvm_gamma: float | None = None
    """Discount factor of its length model; null if it has none."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that engines serve."""

    object: Literal["list"] = "list"
    data: list[Model]
