"""Bodies of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.schemas.parameters import EndpointName, Parameters

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
