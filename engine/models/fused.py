"""Products of a decoder on a Hopper GPU in one launch with what follows: the gate, or norms, rotation and the write to slots."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from yardstick_llm.engine.models.decoder import MLP, Attend, Attention, Decoder, DecoderLayer, FusedAttend, Rows
from yardstick_llm.engine.models.formats.fp8 import QuantizedLinear
from yardstick_llm.engine.models.modules import Linear
from yardstick_llm.kernels import linear_qk_norm_rope, linear_silu_mul
from yardstick_llm.kernels.quantize import quantize_rows


def fuse_products(decoder: Decoder) -> None:
    """Change the layers whose weights the kernels take: dense ones, and those in FP8."""
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.attention, layer.mlp
        if type(attention.qkv_proj) in (Linear, QuantizedLinear) and not attention.over_heads:
            attention.__class__ = FusedAttention
        if isinstance(mlp, MLP) and mlp.compute is None and type(mlp.gate_up_proj) in (Linear, QuantizedLinear):
            mlp.compute = _multiply_and_gate


class FusedAttention(Attention):
    """Projects heads where they are written, where the kernel takes them."""

    def attended(self, x: Rows, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        codes, x_scales = x if isinstance(x, tuple) else (x, None)
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        fits = linear_qk_norm_rope.fits(codes, weight, bias, cos, self.split[1], self.head_dim)
        if not (fits and isinstance(attend, FusedAttend)):
            return super().attended(x, cos, sin, attend)
        heads = self.heads(codes, cos, sin)
        scales = self.qkv_proj.scales if isinstance(self.qkv_proj, QuantizedLinear) else None

        def write(keys: Tensor, values: Tensor, slots: Tensor, kv_scales: Tensor | None) -> Tensor:
            given = heads.q_weight, heads.k_weight, heads.eps, cos, sin, keys, values, slots, kv_scales
            product = linear_qk_norm_rope.linear_qk_norm_rope_triton
            return product(codes, weight, bias, *given, x_scales=x_scales, weight_scales=scales)

        return attend.attend(self.layer, replace(heads, write=write)).flatten(1)


def _multiply_and_gate(mlp: MLP, x: Rows) -> Tensor:
    """:meth:`MLP.whole`, whose first product and gate are one launch where a kernel takes them. In FP8, another one quantises."""
    codes, x_scales = x if isinstance(x, tuple) else (x, None)
    weight, bias = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias
    if not linear_silu_mul.fits(codes, weight, bias):
        return mlp.whole(x)
    scales = mlp.gate_up_proj.scales if isinstance(mlp.gate_up_proj, QuantizedLinear) else None
    gated = linear_silu_mul.linear_silu_mul_triton(codes, weight, bias, x_scales, scales, gelu=mlp.gelu)
    return mlp.down_proj(gated if x_scales is None else quantize_rows(gated))  # type: ignore[no-any-return]
