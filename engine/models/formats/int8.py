"""A decoder whose layers multiply in 8-bit integers on a CPU (:mod:`kernels.int8`): dense weights with a scale for each output and
for each token of their input, and codes of a quantised checkpoint as they are, with the scales of their groups.

Embedding, head, norms, biases, keys, values, attention and what is added from layer to layer stay in the model's dtype, float32 or
bfloat16. Where several processes share a decoder, each quantises its own part, as in FP8 (:mod:`engine.models.formats.fp8`).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from yardstick_llm.engine.models.decoder import MLP, Rows
from yardstick_llm.engine.models.encoder import FeedForward, Layer, Model
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.modules import PROJECTIONS, ConvertedLinear, GroupedLinear, convert_parts, fill_parts
from yardstick_llm.kernels.grouped_experts import Blocks, pairs_by_expert
from yardstick_llm.kernels.int8 import (
    GATE_FIRST,
    INSTRUCTIONS,
    MOST_COLUMNS,
    Panels,
    Weight,
    instructions,
    int8_activated,
    int8_linear,
    pack,
    pack_codes,
    pack_panels,
    takes,
)
from yardstick_llm.kernels.linear import BFLOAT16_INSTRUCTIONS, multiplies_bfloat16
from yardstick_llm.kernels.runtime import HAS_LOOPS, loops

logger = logging.getLogger(__name__)

EXPERTS = ("mlp.gate_up", "mlp.down", "mlp.shared.gate_up_proj", "mlp.shared.down_proj")
"""A layer's linear layers in a mixture of experts, beside those of attention."""


class Int8Linear(ConvertedLinear):
    """A linear layer of codes."""

    weight: Weight

    def fill(self, weight: Tensor) -> None:
        self.weight = pack(weight)

    def fill_codes(self, weight: CodedWeight) -> None:
        plain = weight.zeros is None and weight.offsets is None and weight.codes.dtype == torch.int8
        if plain and weight.scales.shape[1] == 1:
            self.weight = pack_codes(weight.codes, weight.by_row().scales[:, 0])
        else:
            self.weight = panels_of(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return int8_linear(x, self.weight, self.bias)


class Int8GroupedLinear(ConvertedLinear):
    """A matrix of codes for each expert."""

    def __init__(self, like: GroupedLinear) -> None:
        super().__init__(like)
        self.columns = like.weight.shape[1]
        self.weights: list[Weight] = []

    def fill(self, weight: Tensor) -> None:
        self.weights = [pack(matrix) for matrix in weight]

    def forward(self, x: Tensor, experts: Tensor, blocks: Blocks | None, *, by_pair: bool = False) -> Tensor:  # noqa: ARG002
        """See :func:`kernels.grouped_experts.grouped_linear`."""
        out = x.new_full((experts.numel(), self.columns), float("nan"))
        for expert, pairs in pairs_by_expert(experts, len(self.weights)):
            out[pairs] = int8_linear(x[pairs if by_pair else pairs // experts.shape[1]], self.weights[expert], None)
        return out


def parts_of(layer: Layer) -> dict[str, type[ConvertedLinear]]:
    """The parts that :func:`convert` replaces."""
    present = dict(layer.named_modules())
    names = [name for name in (*PROJECTIONS, *EXPERTS) if name in present]
    return {name: Int8GroupedLinear if isinstance(present[name], GroupedLinear) else Int8Linear for name in names}


def panels_of(weight: CodedWeight) -> Panels:
    """Those codes, if :func:`takes_codes`."""
    weight = weight.by_row()
    return pack_panels(weight.codes, weight.scales, weight.zeros, weight.offsets, weight.bits)


def takes_codes(weight: CodedWeight) -> bool:
    """Whether an :class:`Int8Linear` takes these codes as they are."""
    bytes_only = weight.codes.dtype in (torch.int8, torch.uint8)
    return bytes_only and weight.groups is None and takes(weight.shape[1], weight.block[1], weight.bits)


def convert(layer: Layer) -> None:
    """Give a layer its quantised projections, without weights, in place of those it has."""
    convert_parts(layer, parts_of(layer))
    for mlp in layer.modules():
        if isinstance(mlp, MLP):
            mlp.compute = compute_mlp
        elif isinstance(mlp, FeedForward):
            mlp.compute = _compute_feed_forward


def _compute_feed_forward(mlp: FeedForward, x: Tensor) -> Tensor:
    """[tokens, hidden] -> [tokens, hidden]"""
    up, down = _projections(mlp)
    return int8_activated(x, up, down, *mlp.kind, mlp.inner)


def _projections(mlp: FeedForward) -> tuple[Int8Linear, Int8Linear]:
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    assert isinstance(gate_up, Int8Linear)
    assert isinstance(down, Int8Linear)
    return gate_up, down


def compute_mlp(mlp: MLP, x: Rows) -> Tensor:
    """[tokens, hidden] -> [tokens, hidden]; what is between the projections in one operation, unless adapters change them."""
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    if not (isinstance(x, Tensor) and isinstance(gate_up, Int8Linear) and isinstance(down, Int8Linear)):
        return mlp.whole(x)
    return int8_activated(x, gate_up, down, "gelu_tanh" if mlp.gelu else "silu", GATE_FIRST, mlp.size)


fill = fill_parts


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raises :class:`ModelError` where the device cannot multiply 8-bit integers."""
    if device.type != "cpu":
        raise ModelError("--quantize int8 computes on a CPU, and the model is on a GPU; use --quantize fp8 there, or --device cpu.")
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(
            f"--quantize int8 needs float32 or bfloat16 around its products, and --dtype is {name}; leave one of the two out."
        )
    found = instructions()
    if found is None:
        raise ModelError(
            f"--quantize int8 needs a processor with one of {', '.join(INSTRUCTIONS)}, and this one has none; leave --quantize out."
        )
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        raise ModelError(
            f"--quantize int8 with --dtype bfloat16 needs a processor with one of {', '.join(BFLOAT16_INSTRUCTIONS)}, and this one"
            " has none; use --dtype float32."
        )
    if not HAS_LOOPS:
        raise ModelError("--quantize int8 needs the package numba, which is not installed; install it, or leave --quantize out.")
    loops()  # compiles or loads them
    logger.info("the layers' matrix products are computed in int8, with %s, and the rest in %s", found, name)


def check_shapes(decoder: Model) -> None:
    """Raises :class:`ModelError` where a sum of products could exceed 32 bits."""
    layers = {type(layer.mlp): layer for layer in decoder.layers if isinstance(layer, Layer)}
    for name, part in ((name, layer.get_submodule(name)) for layer in layers.values() for name in parts_of(layer)):
        columns = part.get_parameter("weight").shape[-1]
        if columns > MOST_COLUMNS:
            raise ModelError(
                f"--quantize int8 sums at most {MOST_COLUMNS:,} products, and the model's {name.rpartition('.')[2]} has {columns:,}"
                " columns in each process; leave --quantize out."
            )
