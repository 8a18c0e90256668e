"""Composition of an engine's adapters: memory of the device, the decoder's projections, and the adapters loaded at the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine import wire
from engine.lora.blank import blank_adapter
from engine.lora.captured import CapturedRows
from engine.lora.errors import AdapterError
from engine.lora.layout import WHOLE, Layout
from engine.lora.linear import StepRows, adapt
from engine.lora.reader import AdapterReader, capacity_of
from engine.lora.registry import AdapterRegistry
from engine.lora.slots import DeviceSlots
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.source import ADAPTER_FILES, locate, split_revision
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

MODULES: dict[str, tuple[str, ...]] = {"score": (), "lm_head": ("lm_head",), "all": WHOLE}
"""Whole modules by :attr:`~engine.settings.EngineSettings.lora_modules`."""


class AdapterMemory(NamedTuple):
    """The device's side of adapters."""

    layout: Layout
    slots: DeviceSlots
    rows: StepRows
    max_rank: int

    def captured(self, buckets: Sequence[int]) -> CapturedRows:
        """The rows of steps that are captured for ``buckets`` of tokens."""
        return CapturedRows(self.rows, self.slots, self.max_rank, buckets)


def check_settings(settings: EngineSettings) -> None:
    """Raise :class:`ModelError` for settings that do not go with adapters."""
    if not settings.takes_adapters:
        return
    if settings.tensor_parallel > 1:
        raise ModelError("LoRA adapters cannot be used with --tensor-parallel; leave one of the two out.")
    if settings.kv_dtype != "auto":
        raise ModelError("LoRA adapters cannot be used with --kv-dtype fp8, whose scales hold for the base model; leave one out.")


def adapt_decoder(decoder: Decoder, settings: EngineSettings) -> AdapterMemory | None:
    """Reserve the device's memory and give the decoder projections with adapters; None where the engine takes none."""
    if not settings.takes_adapters:
        return None
    layout, weight = Layout(decoder.config), decoder.embed.weight
    capacity = capacity_of(layout, settings.max_lora_rank)
    modules = MODULES[settings.lora_modules]
    slots = DeviceSlots(layout, settings.max_loras_device, capacity, weight.device, weight.dtype, modules)
    size = (capacity + len(modules) * layout.vocab_size * layout.hidden_size) * weight.dtype.itemsize / 2**20
    logger.info("LoRA: %d places of %.0f MiB on the device, rank %d at most", slots.count, size, settings.max_lora_rank)
    rows = StepRows()
    adapt(decoder, layout, rows, slots.products, fused=_fuses(weight.device), embeddings="embed_tokens" in modules)
    return AdapterMemory(layout, slots, rows, settings.max_lora_rank)


def _fuses(device: torch.device) -> bool:
    """Whether operations behind projections make additions. On a CPU, this would save nothing."""
    return device.type == "cuda"


def make_registry(memory: AdapterMemory | None, decoder: Decoder, settings: EngineSettings, info: wire.Info) -> AdapterRegistry:
    """The registry, with the adapters of ``--lora``. Raises :class:`ModelError` if one of them cannot be loaded."""
    if memory is None:
        return AdapterRegistry()
    weight = decoder.embed.weight
    modules = MODULES[settings.lora_modules]
    reader = AdapterReader(memory.layout, info, weight.dtype, settings.max_lora_rank, pinned=weight.is_cuda, modules=modules)
    registry = AdapterRegistry(reader, memory.slots, settings.max_loras)
    for given in settings.lora:
        name, equals, path = given.partition("=")
        if not equals or not path:
            raise ModelError(f"--lora is {given!r:.80}, and must be NAME=PATH.")
        try:
            registry.load(name, locate(*split_revision(path), files=ADAPTER_FILES))
        except (AdapterError, ModelError) as error:
            raise ModelError(f"The LoRA adapter {name} cannot be loaded. {error}") from None
    return registry


def blank_registry(memory: AdapterMemory | None, decoder: Decoder, info: wire.Info) -> AdapterRegistry:
    """The registry of the engine's start; in an engine with adapters it has the blank one alone."""
    if memory is None:
        return AdapterRegistry()
    weight = decoder.embed.weight
    return AdapterRegistry.of(blank_adapter(memory.layout, info, weight.dtype, pinned=weight.is_cuda))
