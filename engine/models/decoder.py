"""One dense decoder for every supported architecture: grouped-query attention, rotary positions and gated feed-forward layers.

What differs between families is data in :class:`~engine.models.config.ModelConfig`: places and offsets of norms, the gate, factors,
soft caps, and the rotation of each layer.

It sees a flat run of tokens and does not know what a batch, a sequence or a cache is: the caller's ``attend`` decides which
keys each query sees. Everything is differentiable, so that the same module is trained and served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.modules import (
    ClassHead,
    Embedding,
    Experts,
    Linear,
    NoNorm,
    Projected,
    RMSNorm,
    TokenHead,
    Unadded,
)
from yardstick_llm.engine.models.registry import ExpertNames, Norms, family_of
from yardstick_llm.engine.models.rope import frequencies_of
from yardstick_llm.kernels.gelu_mul import gelu_mul
from yardstick_llm.kernels.linear import Weight
from yardstick_llm.kernels.lora_layout import LoraDelta
from yardstick_llm.kernels.rms_norm import rms_norm
from yardstick_llm.kernels.rope import rope
from yardstick_llm.kernels.silu_mul import silu_mul

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
        yield from _mlp_views("mlp.", mlp, fused=config.fused_projections or config.fused_mlp)


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


PlainAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], v like k; q and k rotated) -> [tokens, heads, head_dim]"""


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's queries, keys and values as they are projected, and what is to be done to them before anyone attends."""

    qkv: Tensor
    """[tokens, heads + 2 · kv_heads, head_dim], queries, keys and values in that order; with ``write``, the projection's input"""
    kv_heads: int
    q_weight: Tensor | None
    """[head_dim], like k_weight; None where the model has no QK-norm"""
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    """[tokens, rotary_dim / 2] float32, like sin; the other elements of a head are not rotated"""
    sin: Tensor
    delta: LoraDelta | None = None
    """Additions of LoRA adapters to ``qkv``, which come first; None where there are none, and where gradients are computed"""
    write: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    """(keys, values, slots, scales) -> ready queries; see :mod:`engine.models.fused`"""

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v), queries and keys normalised and rotated; differentiable."""
        assert self.delta is None
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
"""Input of a projection: [tokens, size], or in FP8 (:mod:`engine.models.formats.fp8`) the codes and scales of these rows."""


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
        normed = config.qk_norm or config.qk_norm_over_heads
        self.over_heads = config.qk_norm_over_heads
        """Whether the norms are over all heads together."""
        sizes = [heads * config.head_dim if self.over_heads else config.head_dim for heads in self.split]
        self.q_norm = RMSNorm(sizes[0], config, dtype) if normed else None
        self.k_norm = RMSNorm(sizes[1], config, dtype) if normed else None
        self.kv_bounds: Tensor | None = None
        """Where the projection is quantised: :func:`engine.models.formats.quantization.kv_bounds` of its weights."""

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden]; cos, sin: [tokens, rotary_dim / 2]. -> [tokens, hidden], or those ``rows`` of it."""
        return self.projected(self.attended(x, cos, sin, attend), rows)

    def attended(self, x: Rows, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """:meth:`forward` without the output projection. -> [tokens, heads · head_dim]"""
        projected: Tensor | Unadded = self.qkv_proj(x)
        qkv, delta = projected if isinstance(projected, Unadded) else (self._normed(projected), None)
        heads = self.heads(qkv.view(len(qkv), -1, self.head_dim), cos, sin, delta)
        out = attend.attend(self.layer, heads) if isinstance(attend, FusedAttend) else attend(self.layer, *heads.rotated())
        return out.flatten(1)

    def projected(self, attended: Tensor, rows: Tensor | None = None) -> Tensor:
        """The output projection. attended: [tokens, heads · head_dim]. -> [tokens, hidden], or those ``rows`` of it."""
        return self.o_proj(_select_rows(attended, rows))  # type: ignore[no-any-return]

    def _normed(self, qkv: Tensor) -> Tensor:
        """[tokens, (heads + 2 · kv_heads) · head_dim], normalised where norms are over all heads."""
        if not self.over_heads:
            return qkv
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = torch.split(qkv, [heads * self.head_dim for heads in self.split], dim=1)
        return torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], 1)

    def heads(self, qkv: Tensor, cos: Tensor, sin: Tensor, delta: LoraDelta | None = None) -> Heads:
        """See :class:`Heads`."""
        if self.over_heads or self.q_norm is None or self.k_norm is None:
            return Heads(qkv, self.split[1], None, None, 0.0, cos, sin, delta)
        return Heads(qkv, self.split[1], self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, cos, sin, delta)


class MLP(nn.Module):
    """SwiGLU, or GeGLU."""

    gate: Callable[[Tensor], Rows]
    """gate ‖ up, [tokens, 2 · intermediate] -> [tokens, intermediate]"""
    compute: Callable[[MLP, Rows], Tensor] | None = None
    """Takes the place of :meth:`whole` where a number format has a faster order of operations; otherwise None."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, size: int | None = None) -> None:
        """``size``: intermediate size; None for that of the model."""
        super().__init__()
        self.gelu = config.gelu
        self.gate = gelu_mul if self.gelu else silu_mul
        self.size = size = size or config.intermediate_size
        bias = config.mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=bias, dtype=dtype)
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=dtype)

    def forward(self, x: Rows) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.whole(x) if self.compute is None else self.compute(self, x)

    def whole(self, x: Rows) -> Tensor:
        """:meth:`forward`, all rows at once."""
        return self.down_proj(self.gate(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """One layer. It returns its output apart from the residual, so that the next normalisation adds the two."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, before, after = config.hidden_size, config.norms != "after", config.norms != "before"
        self.input_norm = RMSNorm(size, config, dtype) if before else NoNorm()
        self.attention = Attention(config, layer, dtype)
        self.attention_out_norm = RMSNorm(size, config, dtype) if after else None
        self.post_attention_norm = RMSNorm(size, config, dtype) if before else NoNorm()
        """Before the MLP."""
        self.mlp = _feed_forward(config, layer, dtype)
        self.mlp_out_norm = RMSNorm(size, config, dtype) if after else None
        self.residual_scale = config.residual_scale

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden], what the layer before added to residual, or the embeddings where residual is None.

        rows: the only rows to compute behind attention, as no other layer follows; None for all.
        """
        normed, residual = self.normed(x, residual)
        return self.after_attention(self.attention(normed, cos, sin, attend, rows), residual, rows)

    def normed(self, x: Tensor, residual: Tensor | None) -> tuple[Rows, Tensor]:
        """The input of attention, and the residual."""
        return (self.input_norm(x), x) if residual is None else self.input_norm.add(x, residual)

    def after_attention(self, x: Tensor, residual: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [rows, hidden], attention's output, already of ``rows``; residual: [tokens, hidden]. -> as :meth:`forward` returns."""
        x = self._added(x, self.attention_out_norm)
        x, residual = self.post_attention_norm.add(x, _select_rows(residual, rows))
        return self._added(self.mlp(x), self.mlp_out_norm), residual

    def _added(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Normalise and scale the output of attention or of the MLP, as it is added to the residual."""
        x = x if norm is None else norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _feed_forward(config: ModelConfig, layer: int, dtype: torch.dtype) -> MLP | Experts:
    if config.experts is None or layer not in config.experts.layers:
        return MLP(config, dtype)
    shared = config.experts.shared_size
    return Experts(config, MLP(config, dtype, shared) if shared else None, dtype)


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
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
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device="cpu").item()
        """Rounded to the model's dtype, as in Hugging Face transformers."""
        self.layers = nn.ModuleList(DecoderLayer(config, index, dtype) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config, dtype)
        own_head = config.lm_head and not config.tied
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype) if own_head else None
        self.class_head = ClassHead(config, dtype) if config.classes else None
        self.packed_head: Weight | None = None
        """:attr:`head_weight` in the layout of a library, or codes as a file has them; None where it multiplies as it is."""
        self.projected = Projected(() if config.pooling is None else config.pooling.projections)
        """After pooling."""
        self.weight_format: str | None = None
        """Format of the file's codes, and whether layers multiply with them; None for a file of dense weights."""
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        self._ropes = list(dict.fromkeys(ropes))
        self._rope_of = [self._ropes.index(rope) for rope in ropes]
        """[layer] index of its rotation."""
        frequencies = frequencies_of(self._ropes, config.rotary_dim or config.head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """tokens, positions: [tokens] int64. -> hidden rows after the final norm, [tokens, hidden].

        rows: [rows] int64, the tokens whose hidden rows are wanted, at least one; None for all. The last layer computes no others
        behind attention.
        """
        x, residual, rotations = self._before_last_layer(tokens, positions, attend)
        x, residual = self.layers[-1](x, residual, *rotations[self._rope_of[-1]], attend, rows)
        return self.norm.add(x, residual)[0]

    def to_last_attention(self, tokens: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Compute :meth:`forward` up to the last layer's attention. -> its output, [tokens, heads · head_dim], and the residual.

        Not for a part of a model that several processes share, whose sums are hooks of whole modules.
        """
        x, residual, rotations = self._before_last_layer(tokens, positions, attend)
        layer = self._last_layer
        normed, residual = layer.normed(x, residual)
        return layer.attention.attended(normed, *rotations[self._rope_of[-1]], attend), residual

    def from_last_attention(self, attended: Tensor, residual: Tensor, rows: Tensor | None = None) -> Tensor:
        """The rest of :meth:`forward`, from what :meth:`to_last_attention` returns."""
        layer = self._last_layer
        x, residual = layer.after_attention(layer.attention.projected(attended, rows), residual, rows)
        return self.norm.add(x, residual)[0]

    @property
    def _last_layer(self) -> DecoderLayer:
        layer = self.layers[-1]
        assert isinstance(layer, DecoderLayer)
        return layer

    def _before_last_layer(
        self, tokens: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None, list[tuple[Tensor, Tensor]]]:
        """The last layer's input, its residual (None if it is the only layer), and the rotations."""
        rotations = self._rotations(positions.unsqueeze(1))
        x = self._embedded(tokens)
        residual: Tensor | None = None
        for layer, at in zip(self.layers, self._rope_of[:-1], strict=False):
            x, residual = layer(x, residual, *rotations[at], attend)
        return x, residual, rotations

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as :meth:`forward` returns them. -> [rows, vocab]"""
        return self.token_head.logits(hidden)

    @property
    def token_head(self) -> TokenHead:
        """The language-model head. Only of a model that has one."""
        return self.token_head_of(self.head_weight, self.head_operand)

    def token_head_of(self, weight: Tensor, operand: Weight | None = None) -> TokenHead:
        """A head of this model with another ``weight``."""
        return TokenHead(weight, weight if operand is None else operand, self.config.logit_divisor, self.config.logit_cap)

    def class_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as :meth:`forward` returns them. -> [rows, classes], float32, as is the product."""
        assert self.class_head is not None
        return self.class_head(hidden)  # type: ignore[no-any-return]

    def class_rows(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as :meth:`forward` returns them. -> the same shape, what the head reads the mean of."""
        return hidden if self.class_head is None else self.class_head.rows(hidden)

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]; the embedding's own weight where they are tied. Only of a model with a language-model head."""
        assert self.config.lm_head
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def head_operand(self) -> Weight:
        """The weight that :func:`kernels.linear.linear` makes logits with, and nothing else reads: packed on a CPU in float32."""
        return self.head_weight if self.packed_head is None else self.packed_head

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden]. -> [tokens, size] float32, the vectors of a model that pools nothing."""
        return self.projected(hidden)  # type: ignore[no-any-return]

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
            views |= self.class_head.views()
        return {name: view.detach() for name, view in views.items()}

    def layer_views(self, index: int, layer: nn.Module | None = None) -> dict[str, Tensor]:
        """:meth:`checkpoint_views` of one layer, or of ``layer`` in its place."""
        layer = self.layers[index] if layer is None else layer
        assert isinstance(layer, DecoderLayer)
        return {f"model.layers.{index}.{name}": view.detach() for name, view in layer_views(layer, self.config)}

    def _embedded(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of every token's angles, [tokens, rotary_dim / 2] each, float32, for each kind of rotation.

        positions: [tokens, 1], or [tokens, rotary_dim / 2] with one for each frequency.
        """
        rotations = []
        for rotation, frequencies in zip(self._ropes, self.inverse_frequencies, strict=True):
            angles = positions.to(torch.float32) * frequencies
            amplitude = 1.0 if rotation is None else rotation.amplitude
            cos, sin = angles.cos(), angles.sin()
            rotations.append((cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude))
        return rotations
