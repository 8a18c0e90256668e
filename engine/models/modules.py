"""Modules that layers are made of: linear layers, embeddings, norms, experts, the head for tokens; and their conversion to other
formats.

In a mixture of experts, a router chooses a few experts for each token in a layer's feed-forward part. Source: Shazeer et al. 2017,
"Outrageously Large Neural Networks", arXiv 1701.06538; the shared expert is that of Qwen2-MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from yardstick_llm.engine.models.config import BaseConfig, ModelConfig
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.pooling import Mode, Projection
from yardstick_llm.kernels.grouped_experts import Blocks, block_pairs, grouped_linear, route
from yardstick_llm.kernels.linear import Weight, linear
from yardstick_llm.kernels.lora_layout import LoraDelta
from yardstick_llm.kernels.rms_norm import add_rms_norm, rms_norm
from yardstick_llm.kernels.silu_mul import silu_mul
from yardstick_llm.kernels.soft_cap import soft_cap
from yardstick_llm.kernels.whole_attention import runs_of


class Linear(nn.Linear):
    """A linear layer whose weights are allocated and not initialised; the code that builds it fills them."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return linear(x, self.weight, self.bias)


class Unadded(NamedTuple):
    """Output of a projection, and additions of LoRA adapters that the operation behind it makes."""

    y: Tensor
    """[rows, out]"""
    delta: LoraDelta


class Embedding(nn.Embedding):
    """An embedding whose weights are allocated and not initialised."""

    def reset_parameters(self) -> None:
        pass


class TokenHead(NamedTuple):
    """A language-model head: the model's, or an adapter's."""

    weight: Tensor
    """[vocab, hidden]"""
    operand: Weight
    """See :attr:`engine.models.decoder.Decoder.head_operand`."""
    divisor: float
    cap: float
    """Soft cap of the logits."""

    def input(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as the decoder returns them. -> the rows whose products with the weight are uncapped logits."""
        return hidden if self.divisor == 1.0 else hidden / self.divisor

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as the decoder returns them. -> [rows, vocab]"""
        return soft_cap(linear(self.input(hidden), self.operand), self.cap)


class ClassHead(nn.Module):
    """The classification head of a decoder: a matrix, or behind an inner layer a layer with a bias. Products are in float32."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, classes = config.hidden_size, len(config.classes)
        self.inner = Linear(size, size, dtype=dtype) if config.class_inner else None
        self.out = Linear(size, classes, bias=config.class_inner, dtype=dtype)
        self.late, self.divisor = config.head_pooling == "late", config.class_divisor

    def rows(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the same shape. Where the head reads a mean, :meth:`forward` takes the mean of these."""
        return self._activated(hidden) if self.late else hidden

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, classes], float32."""
        x = hidden.float() if self.late else self._activated(hidden)
        logits = linear(x, *_in_float(self.out))
        return logits if self.divisor == 1.0 else logits / self.divisor

    def _activated(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        return x if self.inner is None else nn.functional.gelu(linear(x, *_in_float(self.inner)))

    def views(self) -> dict[str, Tensor]:
        """Names in checkpoints and the parameters that they fill."""
        if self.inner is None:
            return {"score.weight": self.out.weight}
        parts = {"dense": self.inner, "classifier": self.out}
        return {f"{name}.{kind}": each for name, part in parts.items() for kind, each in part.named_parameters()}


def _in_float(part: Linear) -> tuple[Tensor, Tensor | None]:
    return part.weight.float(), None if part.bias is None else part.bias.float()


class RMSNorm(nn.Module):
    """The weight of a root-mean-square normalisation, ones at first.

    If the checkpoint stores the difference to 1, the weight is in float32, because the sum has more digits than the model's dtype.
    """

    def __init__(self, size: int, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.offset = config.norm_offset
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32 if self.offset else dtype))
        self.eps = config.norm_eps

    @torch.no_grad()
    def add_offset(self) -> None:
        """Make the weight from what a checkpoint stores, which was copied into it."""
        if self.offset:
            self.weight.add_(self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum)"""
        return add_rms_norm(x, residual, self.weight, self.eps)


class NoNorm(nn.Module):
    """Takes the place of a norm that a model does not have."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, size] -> the same"""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, sum)"""
        total = x + residual
        return total, total


def refuse_experts(config: Any, option: str) -> None:
    """Raise :class:`ModelError` for a model with experts, which ``option`` does not support."""
    if config.experts is not None:
        raise ModelError(f"{option} does not support mixtures of experts such as {config.architecture}; leave it out.")


class GroupedLinear(nn.Module):
    """A matrix for each expert, uninitialised."""

    bias = None

    def __init__(self, experts: int, size: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, columns, size, dtype=dtype))

    def forward(self, x: Tensor, experts: Tensor, blocks: Blocks | None, *, by_pair: bool = False) -> Tensor:
        """See :func:`kernels.grouped_experts.grouped_linear`."""
        return grouped_linear(x, self.weight, experts, blocks, by_pair=by_pair)


class Experts(nn.Module):
    """Router, experts and, in some families, an expert that all tokens pass, weighted by a gate."""

    def __init__(self, config: BaseConfig, shared: nn.Module | None, dtype: torch.dtype) -> None:
        """``shared``: the shared expert's feed-forward layer."""
        super().__init__()
        experts = config.experts
        assert experts is not None
        hidden, size = config.hidden_size, experts.size
        self.chosen, self.renormalise = experts.chosen, experts.renormalise
        self.held = experts.held or range(experts.count)
        """Experts whose matrices are here. Rows of others count as zero, which other processes add."""
        self.are_all_held = len(self.held) == experts.count
        self.router = Linear(hidden, experts.count, bias=False, dtype=dtype)
        self.gate_up = GroupedLinear(len(self.held), hidden, 2 * size, dtype)
        self.gate: Callable[[Tensor], Any] = silu_mul
        """gate ‖ up, [pairs, 2 · size] -> input of :attr:`down`"""
        self.down = GroupedLinear(len(self.held), size, hidden, dtype)
        self.input: Callable[[Tensor], Any] | None = None
        """[tokens, hidden] -> input of :attr:`gate_up` and of the shared expert; None: as it is"""
        self.shared = shared
        self.shared_gate = None if shared is None else Linear(hidden, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        experts, weights = route(self.router(x), self.chosen, renormalise=self.renormalise)
        if not self.are_all_held:
            elsewhere = (experts < self.held.start) | (experts >= self.held.stop)
            experts = (experts - self.held.start).masked_fill(elsewhere, len(self.held))
        rows = x if self.input is None else self.input(x)
        blocks = block_pairs(experts, len(self.held)) if experts.is_cuda else None
        inner = self.gate(self.gate_up(rows, experts, blocks))
        found = self.down(inner, experts, blocks, by_pair=True).view(len(x), self.chosen, -1)
        if not self.are_all_held:
            found = found.masked_fill(elsewhere.unsqueeze(2), 0)
        out: Tensor = (found.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
        if self.shared is None or self.shared_gate is None:
            return out
        return out + self.shared_gate(x).sigmoid() * self.shared(rows)  # type: ignore[no-any-return]


class Projected(nn.Module):
    """The ``Dense`` and ``LayerNorm`` modules after pooling, in float32."""

    def __init__(self, projections: tuple[Projection, ...]) -> None:
        super().__init__()
        self.functions: list[Callable[[Tensor], Tensor]] = [getattr(nn, each.activation)() for each in projections]
        self.parts = nn.ModuleList(
            Linear(each.inner, each.size, bias=each.bias) if each.inner else nn.LayerNorm(each.size) for each in projections
        )
        self.residuals = nn.ModuleDict()
        """By the place of a part, what its input is multiplied by before it is added to the output."""
        for place, each in enumerate(projections):
            if each.residual:
                self.residuals[str(place)] = nn.Identity() if each.inner == each.size else Linear(each.inner, each.size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], float32."""
        x = x.float()
        for place, (part, function) in enumerate(zip(self.parts, self.functions, strict=True)):
            added = self.residuals[str(place)](x) if str(place) in self.residuals else None
            x = function(part(x))
            x = x if added is None else x + added
        return x


def pooled(hidden: Tensor, lengths: Sequence[int], *modes: Mode) -> Tensor:
    """hidden: the tokens of each sequence, one sequence after the other, [sum of lengths, size]; with ``cls`` or ``last`` alone,
    only the token that is read of each. -> [sequences, modes · size] float32."""
    if modes in (("cls",), ("last",)):
        return hidden.float()
    found = []
    for start, count, length, _ in runs_of(lengths):
        part = hidden[start : start + count * length].view(count, length, -1)
        vectors = [_pooled(part, mode) for mode in modes]
        found.append(vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _pooled(part: Tensor, mode: Mode) -> Tensor:
    """[sequences, length, size] -> [sequences, size] float32"""
    length = part.shape[1]
    if mode in ("cls", "last"):
        return part[:, 0 if mode == "cls" else -1].float()
    if mode == "max":
        return part.amax(1).float()
    if mode == "weightedmean":
        weights = torch.arange(1, length + 1, dtype=torch.float32, device=part.device)
        weighted: Tensor = torch.einsum("ctn,t->cn", part.float(), weights / weights.sum())
        return weighted
    if mode == "mean_sqrt":
        return part.sum(1, dtype=torch.float32).div_(length**0.5)
    return part.mean(1, dtype=torch.float32)


PROJECTIONS = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""A layer's linear layers."""


class ConvertedLinear(nn.Module):
    """A linear layer in another format. It has the bias of the layer it is made like, and no weight before :meth:`fill`."""

    def __init__(self, like: Linear | GroupedLinear) -> None:
        super().__init__()
        self.bias = like.bias

    def fill(self, weight: Tensor) -> None:
        """Convert ``weight``, [out, in] or [experts, out, in], which can be overwritten afterwards."""
        raise NotImplementedError

    def fill_codes(self, weight: CodedWeight) -> None:
        """Take codes as a file has them; a layer that is chosen for them overrides it."""
        raise NotImplementedError


def convert_parts(layer: nn.Module, parts: Mapping[str, Callable[[Any], nn.Module]]) -> None:
    """Replace the named parts of a layer by those that ``parts`` makes like them. The memory of the old ones is freed."""
    for name, part in parts.items():
        layer.set_submodule(name, part(layer.get_submodule(name)))


@torch.no_grad()
def fill_parts(layer: nn.Module, source: nn.Module, codes: dict[str, CodedWeight] | None = None) -> None:
    """Convert the weights of ``source`` into ``layer``, whose other parameters are like those of ``source``. ``codes``: of the
    parts that take them in place of weights; it is emptied."""
    for name, parameter in layer.named_parameters():  # norms and biases
        parameter.copy_(source.get_parameter(name))
    for name, part in layer.named_modules():
        if isinstance(part, ConvertedLinear) and codes is not None and name in codes:
            part.fill_codes(codes.pop(name))
        elif isinstance(part, ConvertedLinear):
            part.fill(source.get_parameter(f"{name}.weight"))
