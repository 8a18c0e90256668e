"""Names of a layer's weights in checkpoints of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.experts import Experts
from engine.models.modules import Linear
from engine.models.registry import ExpertNames, Norms, family_of

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
    names = "self_attn.qkv_proj" if config.fused_projections else "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    yield from _parts(names, attention.qkv_proj, [sum(rows)] if config.fused_projections else rows)
    yield from _parts("self_attn.o_proj", attention.o_proj, [config.hidden_size])
    if isinstance(mlp, Experts):
        yield from _expert_views(mlp, family_of(config.architecture).experts)
    else:
        yield from _mlp_views("mlp.", mlp, fused=config.fused_projections)


def _mlp_views(prefix: str, mlp: nn.Module, *, fused: bool = False) -> Iterator[tuple[str, Tensor]]:
    into, out = mlp.get_submodule("gate_up_proj"), mlp.get_submodule("down_proj")
    rows = len(into.get_parameter("weight"))
    names = [f"{prefix}gate_up_proj"] if fused else [f"{prefix}gate_proj", f"{prefix}up_proj"]
    yield from _parts(" ".join(names), into, [rows // len(names)] * len(names))
    yield from _parts(f"{prefix}down_proj", out, [len(out.get_parameter("weight"))])


def _expert_views(mlp: Experts, names: ExpertNames | None) -> Iterator[tuple[str, Tensor]]:
    if names == "granite":
        yield "block_sparse_moe.router.layer.weight", mlp.router.weight
        yield "block_sparse_moe.input_linear.weight", mlp.gate_up.weight
        yield "block_sparse_moe.output_linear.weight", mlp.down.weight
        return
    prefix, parts = ("mlp", ("gate_proj", "up_proj", "down_proj")) if names == "qwen" else ("block_sparse_moe", ("w1", "w3", "w2"))
    yield f"{prefix}.gate.weight", mlp.router.weight
    for index, gate_up, down in zip(mlp.held, mlp.gate_up.weight, mlp.down.weight, strict=True):
        for part, view in zip(parts, (*gate_up.chunk(2), down), strict=True):
            yield f"{prefix}.experts.{index}.{part}.weight", view
    if mlp.shared is not None and mlp.shared_gate is not None:
        yield "mlp.shared_expert_gate.weight", mlp.shared_gate.weight
        yield from _mlp_views("mlp.shared_expert.", mlp.shared)


def _parts(names: str, projection: nn.Module, sizes: list[int]) -> Iterator[tuple[str, Tensor]]:
    assert isinstance(projection, Linear)  # a quantised projection no longer has the checkpoint's weights
    for kind, parameter in projection.named_parameters():
        for name, view in zip(names.split(), torch.split(parameter, sizes), strict=True):
            yield f"{name}.{kind}", view
