"""Shapes and initial weights of the two models."""

from __future__ import annotations

import math

import torch
from torch import nn

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.rope import Rope

CONTEXT = 1024
"""Context length in tokens. Training texts have fewer than 200."""

EMBEDDING_DEVIATION = 0.08


def base_config(vocab_size: int, eos: int) -> ModelConfig:
    """Return the base model's shape, about two million parameters."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=640,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        max_context=CONTEXT,
        rope=Rope(10000.0),
        tied=True,
        qk_norm=True,
        eos_token_ids=(eos,),
    )


def length_config(vocab_size: int, eos: int) -> ModelConfig:
    """Return the length model's shape, about 0.7 million parameters."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_context=CONTEXT,
        rope=Rope(10000.0),
        tied=True,
        qk_norm=True,
        eos_token_ids=(eos,),
    )


def initialise(model: nn.Module, layers: int, seed: int) -> None:
    """Initialise every matrix by its fan-in; those that add to the residual are divided by the square root of their number.

    With the usual deviation of 0.02, models of this size learn nothing in their first minutes.
    """
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            deviation = EMBEDDING_DEVIATION if "embed" in name else 1 / math.sqrt(parameter.shape[1])
            if "o_proj" in name or "down_proj" in name:
                deviation /= math.sqrt(2 * layers)
            parameter.normal_(0.0, deviation, generator=noise)


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of each tensor once, so that a tied head adds none."""
    return sum(parameter.numel() for parameter in model.parameters())
