"""One dense decoder for every supported architecture: pre-norm, grouped-query attention, rotary positions, SwiGLU.

It sees a flat run of tokens and does not know what a batch, a sequence or a cache is: the caller's ``attend`` decides which
keys each query sees. Everything is differentiable, so that the same module is trained and served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from kernels.linear import linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul

PlainAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], v like k; q and k rotated) -> [tokens, heads, head_dim]"""


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's queries, keys and values as they are projected, and what is to be done to them before anyone attends."""

    qkv: Tensor
    """[tokens, heads + 2 · kv_heads, head_dim], queries, keys and values in that order"""
    kv_heads: int
    q_weight: Tensor | None
    """[head_dim], like k_weight; None where the model has no QK-norm"""
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    """[tokens, head_dim / 2] float32, like sin"""
    sin: Tensor

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v), queries and keys normalised and rotated; differentiable."""
        q, k, v = torch.split(self.qkv, [self.qkv.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_weight is not None and self.k_weight is not None:
            q, k = rms_norm(q, self.q_weight, self.eps), rms_norm(k, self.k_weight, self.eps)
        return rope(q, self.cos, self.sin), rope(k, self.cos, self.sin), v


@dataclass(frozen=True, slots=True)
class FusedAttend:
    """Attention that takes the heads as they are projected, because it has a way of its own to make them ready."""

    attend: Callable[[int, Heads], Tensor]
    """(layer, heads) -> [tokens, heads, head_dim]"""


Attend = PlainAttend | FusedAttend

Rows = Tensor | tuple[Tensor, Tensor]
"""Input of a projection: [tokens, size], or in FP8 (:mod:`engine.models.fp8`) the codes and scales of these rows."""


class Linear(nn.Linear):
    """A linear layer whose weights are allocated and not initialised; the code that builds it fills them."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding whose weights are allocated and not initialised."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """The weight of a root-mean-square normalisation, ones at first."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum)"""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, normalisation and rotation of one layer's queries, keys and values; attending itself is the caller's."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        attended = config.num_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, sum(self.split) * config.head_dim, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(attended, config.hidden_size, bias=config.o_bias, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, dtype) if config.qk_norm else None
        self.kv_bounds: Tensor | None = None
        """Where the projection is quantised: :func:`engine.models.kv_scales.kv_bounds` of its weights."""

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden]; cos, sin: [tokens, head_dim / 2]. -> [tokens, hidden], or those ``rows`` of it."""
        heads = self._heads(self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        out = attend.attend(self.layer, heads) if isinstance(attend, FusedAttend) else attend(self.layer, *heads.rotated())
        return self.o_proj(_some(out.flatten(1), rows))  # type: ignore[no-any-return]

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        kv_heads = self.split[1]
        if self.q_norm is None or self.k_norm is None:
            return Heads(qkv, kv_heads, None, None, 0.0, cos, sin)
        return Heads(qkv, kv_heads, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, cos, sin)


class MLP(nn.Module):
    """SwiGLU."""

    gate: Callable[[Tensor], Rows]
    """gate ‖ up, [tokens, 2 · intermediate] -> [tokens, intermediate]"""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = silu_mul
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=bias, dtype=dtype)
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=dtype)

    def forward(self, x: Rows) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down_proj(self.gate(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """One layer. It returns its output apart from the residual, so that the next normalisation adds the two."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = Attention(config, layer, dtype)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden], what the layer before added to residual, or the embeddings where residual is None.

        rows: the only rows to compute behind attention, as no other layer follows; None for all.
        """
        x, residual = (self.input_norm(x), x) if residual is None else self.input_norm.add(x, residual)
        x = self.attention(x, cos, sin, attend, rows)
        x, residual = self.post_attention_norm.add(x, _some(residual, rows))
        return self.mlp(x), residual


def _some(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


class Decoder(nn.Module):
    """The whole model. Weights are uninitialised until a loader or a trainer fills them.

    Build it in the dtype it is to have: rotary frequencies stay float32 in every dtype, and ``.to(dtype)`` would round them.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, index, dtype) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        own_head = config.lm_head and not config.tied
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype) if own_head else None
        classes = len(config.classes)
        self.class_head = Linear(config.hidden_size, classes, bias=False, dtype=dtype) if classes else None
        self.packed_head: Tensor | None = None
        """:attr:`head_weight` from :func:`kernels.linear.pack`; None where it multiplies as it is."""
        self.register_buffer("inverse_frequencies", config.rope.inverse_frequencies(config.head_dim), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """tokens, positions: [tokens] int64. -> hidden rows after the final norm, [tokens, hidden].

        rows: [rows] int64, the tokens whose hidden rows are wanted, at least one; None for all. The last layer computes no others
        behind attention.
        """
        cos, sin = self._rotation(positions)
        x: Tensor = self.embed(tokens)
        residual: Tensor | None = None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, cos, sin, attend)
        x, residual = self.layers[-1](x, residual, cos, sin, attend, rows)
        assert residual is not None
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as :meth:`forward` returns them. -> [rows, vocab]"""
        return linear(hidden, self.head_operand)

    def class_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as :meth:`forward` returns them. -> [rows, classes], float32, as is the product."""
        assert self.class_head is not None
        return linear(hidden.float(), self.class_head.weight.float())

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]; the embedding's own weight where they are tied. Only of a model with a language-model head."""
        assert self.config.lm_head
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def head_operand(self) -> Tensor:
        """The weight that :func:`kernels.linear.linear` makes logits with, and nothing else reads: packed on a CPU in float32."""
        return self.head_weight if self.packed_head is None else self.packed_head

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Hugging Face tensor name -> the part of a parameter that it fills, detached and writable."""
        views = self.outer_views()
        for index in range(len(self.layers)):
            views |= self.layer_views(index)
        return views

    def outer_views(self) -> dict[str, Tensor]:
        """:meth:`checkpoint_views` of all that is outside the layers."""
        views = {"model.embed_tokens.weight": self.embed.weight, "model.norm.weight": self.norm.weight}
        if self.head is not None:
            views["lm_head.weight"] = self.head.weight
        if self.class_head is not None:
            views["score.weight"] = self.class_head.weight
        return {name: view.detach() for name, view in views.items()}

    def layer_views(self, index: int, layer: nn.Module | None = None) -> dict[str, Tensor]:
        """:meth:`checkpoint_views` of one layer, or of ``layer`` in its place."""
        layer = self.layers[index] if layer is None else layer
        assert isinstance(layer, DecoderLayer)
        return {f"model.layers.{index}.{name}": view.detach() for name, view in _layer_views(layer, self.config)}

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every token's angles, [tokens, head_dim / 2] each, float32."""
        angles = positions.to(torch.float32).unsqueeze(1) * self.inverse_frequencies
        amplitude = self.config.rope.amplitude
        return (angles.cos(), angles.sin()) if amplitude == 1.0 else (angles.cos() * amplitude, angles.sin() * amplitude)


def _layer_views(layer: DecoderLayer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Names below ``model.layers.N.`` and the parts of the (fused) parameters they fill."""
    yield "input_layernorm.weight", layer.input_norm.weight
    yield "post_attention_layernorm.weight", layer.post_attention_norm.weight
    attention, mlp = layer.attention, layer.mlp
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", attention.q_norm.weight
        yield "self_attn.k_norm.weight", attention.k_norm.weight
    rows = [heads * config.head_dim for heads in attention.split]
    fused = (
        ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", attention.qkv_proj, rows),
        ("self_attn.o_proj", attention.o_proj, [config.hidden_size]),
        ("mlp.gate_proj mlp.up_proj", mlp.gate_up_proj, [config.intermediate_size] * 2),
        ("mlp.down_proj", mlp.down_proj, [config.hidden_size]),
    )
    for names, projection, sizes in fused:
        assert isinstance(projection, Linear)  # a quantised projection no longer has the checkpoint's weights
        for kind, parameter in projection.named_parameters():
            for name, view in zip(names.split(), torch.split(parameter, sizes), strict=True):
                yield f"{name}.{kind}", view
