"""Architectures that the one decoder covers. To add a dense model that differs by these flags only, add a line."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.errors import ModelError


@dataclass(frozen=True)
class Family:
    """Flags of an architecture."""

    model_type: str
    """``model_type`` of the Hugging Face configuration."""
    qk_norm: bool = False
    """Queries and keys are normalised per head before the rotation."""
    qkv_bias_only: bool = False
    """Query, key and value projections always have a bias and the output projection never; otherwise the configuration's
    ``attention_bias`` decides for all four."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias_only=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True),
}


def family_of(architecture: str) -> Family:
    """Raises :class:`ModelError` for an architecture that is not in :data:`FAMILIES`."""
    family = FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"The architecture {architecture} in config.json is not supported; use a model with one of: {supported}.")
    return family
