"""Builds what an engine needs to read images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine import wire
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.vision.decoder import VisionDecoder
from engine.requests.image_embeddings import EmbeddingCache
from engine.settings import CPU_BATCHED_PATCHES, GPU_BATCHED_PATCHES, EngineSettings
from engine.vision.intake import ImageIntake
from engine.vision.steps import StepImages


class Vision(NamedTuple):
    """The parts of a loop that images need."""

    steps: StepImages
    intake: ImageIntake | None
    """None where the model reads no images."""
    info: wire.VisionInfo | None


def check_vision_settings(settings: EngineSettings, config: ModelConfig) -> None:
    """Raise :class:`ModelError` for settings that a model of text and images does not have."""
    if config.vision is None:
        return
    if settings.tensor_parallel > 1:
        raise ModelError(f"A {config.architecture} has a vision tower, so --tensor-parallel cannot share it; leave the option out.")


def assemble_vision(decoders: Sequence[Decoder], settings: EngineSettings, slots: int) -> Vision:
    """decoders: the main model's and, if there is one, the length model's; slots: of each."""
    towers = {bool(place): decoder for place, decoder in enumerate(decoders) if isinstance(decoder, VisionDecoder)}
    if False not in towers:
        return Vision(StepImages(), None, None)
    config, weight = towers[False].config, towers[False].embed.weight
    assert config.vision is not None
    patches = settings.max_batched_patches or (GPU_BATCHED_PATCHES if weight.is_cuda else CPU_BATCHED_PATCHES)
    token_bytes = {key: each.config.hidden_size * each.embed.weight.element_size() for key, each in towers.items()}
    cache = EmbeddingCache(token_bytes, settings.image_cache_mib << 20, patches)
    most = min(config.max_context, slots)
    info = describe_vision(config, settings.max_image_tokens, most)
    return Vision(StepImages(towers, cache), ImageIntake(config.vision, cache), info)


def describe_vision(config: ModelConfig, max_image_tokens: int, most: int) -> wire.VisionInfo:
    """most: tokens of a prompt."""
    vision = config.vision
    assert vision is not None
    constants, side = vision.preprocessing, vision.patch_size * vision.merge_size
    return wire.VisionInfo(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        min_pixels=constants.min_pixels,
        max_pixels=max(side**2, min(constants.max_pixels, max_image_tokens * side**2)),
        image_token=vision.image_token,
        max_tokens=most,
    )
