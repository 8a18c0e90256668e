"""Names of a layer's weights in checkpoints of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.modules import Linear
from engine.models.registry import Norms

if TYPE_CHECKING:
    from engine.models.decoder import DecoderLayer

NORM_NAMES: dict[Norms, dict[str, str]] = {
    "before": {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    "after": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "around": {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""Names of a layer's norms in checkpoints."""


def layer_views(layer: DecoderLayer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Names below ``model.layers.N.`` and the parts of the (fused) parameters they fill."""
    for name, stored in NORM_NAMES[config.norms].items():
        yield f"{stored}.weight", layer.get_parameter(f"{name}.weight")
    attention, mlp = layer.attention, layer.mlp
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", attention.q_norm.weight
        yield "self_attn.k_norm.weight", attention.k_norm.weight
    rows = [heads * config.head_dim for heads in attention.split]
    inner = [config.intermediate_size] * 2
    if config.fused_projections:
        into = (
            ("self_attn.qkv_proj", attention.qkv_proj, [sum(rows)]),
            ("mlp.gate_up_proj", mlp.gate_up_proj, [sum(inner)]),
        )
    else:
        into = (
            ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", attention.qkv_proj, rows),
            ("mlp.gate_proj mlp.up_proj", mlp.gate_up_proj, inner),
        )
    fused = (
        *into,
        ("self_attn.o_proj", attention.o_proj, [config.hidden_size]),
        ("mlp.down_proj", mlp.down_proj, [config.hidden_size]),
    )
    for names, projection, sizes in fused:
        assert isinstance(projection, Linear)  # a quantised projection no longer has the checkpoint's weights
        for kind, parameter in projection.named_parameters():
            for name, view in zip(names.split(), torch.split(parameter, sizes), strict=True):
                yield f"{name}.{kind}", view
