"""Configuration of a vision tower: ``vision_config`` of ``config.json``, and the constants of ``preprocessor_config.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yardstick_llm.engine.models.files import Keys, read_json

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""The second holds the first as ``image_processor`` in checkpoints of newer releases."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3
"""Number of Pillow's filter, with which gateways resize."""
_ALWAYS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become the tower's input. Defaults are those of transformers' class for Qwen2-VL."""

    mean: tuple[float, ...] = CLIP_MEAN
    """[channels]"""
    std: tuple[float, ...] = CLIP_STD
    """[channels]"""
    rescale: float = 1 / 255
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280


@dataclass(frozen=True)
class VisionConfig:
    """Shape of a tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    out_size: int
    """Hidden size of the decoder."""
    full_attention: tuple[int, ...]
    """Blocks that attend to the whole image; the others attend within windows."""
    window: int
    """Side of a window, in merged patches."""
    image_token: int
    """Token that marks a merged patch in rendered chat templates."""
    patch_size: int = 14
    """Pixels."""
    merge_size: int = 2
    """Patches."""
    frames: int = 2
    """Frames that a patch covers. A still image repeats its frame."""
    theta: float = 10000.0
    """Base of the rotation."""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch of one frame."""
        return 3 * self.patch_size**2

    def tokens_of(self, rows: int, columns: int) -> int:
        """Tokens of an image of ``rows`` by ``columns`` patches."""
        return rows * columns // self.merge_size**2


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` with the keys of its ``text_config``, if it has one, beside the others.

    The embedding is tied where either level says so, as in transformers.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    said = [level["tie_word_embeddings"] for level in (raw, text) if level.get("tie_word_embeddings") is not None]
    tied = {"tie_word_embeddings": True if True in said else said[0]} if said else {}
    return {**raw, **text, "architectures": raw.get("architectures")} | tied


def parse_vision(keys: Keys, hidden_size: int, vocab_size: int) -> VisionConfig:
    """Read the tower of Qwen2.5-VL. ``hidden_size``, ``vocab_size``: of the decoder. Raises
    :class:`~engine.models.files.ModelError`."""
    inner = keys.section("vision_config")
    if inner is None:
        raise keys.error("vision_config", "is missing; download the model again or correct the file")
    if inner.text("hidden_act", "silu") != "silu":
        raise inner.error("hidden_act", "is not supported; only silu is")
    channels = inner.count("in_channels", inner.count("in_chans", 3))
    if channels != 3:
        raise inner.error("in_channels", f"is {channels}, and only images of 3 channels are supported")
    rope = inner.section("rope_parameters")
    if rope is not None and rope.text("rope_type", "axial") not in ("axial", "default"):
        raise rope.error("rope_type", "is not supported; only axial is")
    merge, patch = inner.count("spatial_merge_size", 2), inner.count("patch_size", 14)
    # Releases 4 of transformers leave out values of vision_config that are the defaults of its class, which these are.
    config = VisionConfig(
        depth=inner.count("depth", 32),
        hidden_size=inner.count("hidden_size", 3584),
        intermediate_size=inner.count("intermediate_size", 3420),
        heads=inner.count("num_heads", 16),
        out_size=inner.count("out_hidden_size", 3584),
        full_attention=tuple(inner.ids("fullatt_block_indexes")) if inner.present("fullatt_block_indexes") else (7, 15, 23, 31),
        window=inner.count("window_size", 112) // merge // patch,
        image_token=keys.count("image_token_id", 151655),
        patch_size=patch,
        merge_size=merge,
        frames=inner.count("temporal_patch_size", 2),
        theta=10000.0 if rope is None else rope.number("rope_theta", 10000.0),
    )
    if config.hidden_size % (4 * config.heads):
        raise inner.error("hidden_size", "must be a multiple of 4 times num_heads, because rows and columns are rotated in pairs")
    if config.out_size != hidden_size:
        raise inner.error("out_hidden_size", f"is {config.out_size}, and the decoder's hidden_size is {hidden_size}")
    if config.window < 1:
        raise inner.error("window_size", "is smaller than a merged patch")
    if config.image_token >= vocab_size:
        raise keys.error("image_token_id", f"is not in the vocabulary of {vocab_size} tokens")
    return config


def load_preprocessing(directory: Path, config: VisionConfig) -> Preprocessing:
    """Read the constants of a model directory; the defaults where it has no file of them. Raises
    :class:`~engine.models.files.ModelError` for what gateways and engine cannot do."""
    if (directory / PREPROCESSOR).is_file():
        keys = Keys(read_json(directory / PREPROCESSOR), PREPROCESSOR)
    elif (directory / PROCESSOR).is_file():
        section = Keys(read_json(directory / PROCESSOR), PROCESSOR).section("image_processor")
        if section is None:
            return Preprocessing()
        keys = section
    else:
        return Preprocessing()
    for key in _ALWAYS:
        if not keys.flag(key, True):
            raise keys.error(key, "is false, which is not supported")
    for key, expected in (
        ("patch_size", config.patch_size),
        ("merge_size", config.merge_size),
        ("temporal_patch_size", config.frames),
        ("resample", BICUBIC),
    ):
        if keys.count(key, expected) != expected:
            raise keys.error(key, f"is not {expected}, which is not supported")
    size, default = keys.section("size"), Preprocessing()
    least = default.min_pixels if size is None else size.count("shortest_edge", size.count("min_pixels", default.min_pixels))
    most = default.max_pixels if size is None else size.count("longest_edge", size.count("max_pixels", default.max_pixels))
    return Preprocessing(
        mean=keys.numbers_like("image_mean", default.mean),
        std=keys.numbers_like("image_std", default.std),
        rescale=keys.number("rescale_factor", default.rescale),
        min_pixels=keys.count("min_pixels", least),
        max_pixels=keys.count("max_pixels", most),
    )
