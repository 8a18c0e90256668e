"""Formats of the weights of layers: 8 bits, or the dtype of the model as the library that multiplies wants it; and FP8 for keys and
values.

Keys and values in FP8 (e4m3) have a scale for each layer and key-value head, from the model's weights alone. It has to be so large
that no number exceeds the largest code, 448. Weights give a bound. What enters the projection is normalised, so its length is at
most the square root of the hidden size, and by the inequality of Cauchy and Schwarz a key or value is at most that times the length
of its row of weights. With QK-norm a key's own length is bounded. Rotation mixes two elements of a key and keeps their common
length.

The bound is loose: numbers of a usual prompt are 30 to 60 times smaller. That costs nothing, because e4m3 is a floating-point
format. It has its full precision, three bits behind the leading one, from 448 down to 1/28,672 of that. So nothing is calibrated,
and all replicas of a model have the same scales. A layer has one for each key-value head, not one for all, because a key-value
head is whole in one process: then ``--tensor-parallel`` changes no code.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder, DecoderLayer
from yardstick_llm.engine.models.encoder import Layer, Model
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats import fp8, int8, packed
from yardstick_llm.engine.models.modules import Linear
from yardstick_llm.kernels.int8 import instructions
from yardstick_llm.kernels.linear import ONEDNN, pack
from yardstick_llm.kernels.quantize import CAPABILITY, MAX_CODE

MARGIN = 1.25
"""For the rounding of the inputs and products, also where matrices are quantised."""


def bounded(config: ModelConfig) -> bool:
    """Whether the weights bound the keys and values: what enters the projections is normalised."""
    return config.norms != "after"


def kv_scales(decoder: Decoder) -> Tensor:
    """[layers, 2, kv_heads] float32, powers of two, on the device of ``decoder``: of keys and of values. Raises :class:`ModelError`
    if nothing bounds them."""
    if not bounded(decoder.config):
        raise ModelError(
            f"--kv-dtype fp8 needs norms before the projections, which bound keys and values, and {decoder.config.architecture} has"
            " none; leave --kv-dtype out."
        )
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    known = [layer.attention.kv_bounds for layer in layers]
    bounds = torch.stack(
        [kv_bounds(layer, decoder.config) if bound is None else bound for layer, bound in zip(layers, known, strict=True)]
    )
    bounds = bounds.to(decoder.embed.weight.device)  # quantised weights were bounded where they were loaded
    _, exponents = torch.frexp((bounds * (MARGIN / MAX_CODE)).clamp(min=1e-20))  # 2 ** exponent is larger, by a factor of 2 at most
    return torch.ldexp(torch.ones_like(bounds), exponents)


@torch.no_grad()
def kv_bounds(layer: DecoderLayer, config: ModelConfig) -> Tensor:
    """[2, kv_heads] float32: no key and no value of ``layer``, which is not quantised, is larger."""
    attention = layer.attention
    projection, head_dim = attention.qkv_proj, attention.head_dim
    assert isinstance(projection, Linear)
    heads, kv_heads, _ = attention.split
    rows = slice(heads * head_dim, None)
    norm = layer.get_parameter("input_norm.weight").float()
    bounds = (projection.weight[rows].float() * norm).norm(dim=1) * math.sqrt(config.hidden_size)
    if projection.bias is not None:
        bounds += projection.bias[rows].float().abs()
    keys, values = bounds.view(2, kv_heads, head_dim)
    if attention.k_norm is not None:
        # The length of all elements together is bounded, so that of a pair is too.
        keys = math.sqrt(head_dim) * attention.k_norm.weight.float().abs().expand(kv_heads, -1)
        join = torch.maximum
    else:
        join = torch.hypot
    rotated, rest = torch.tensor_split(keys, [config.rotary_dim or head_dim], 1)
    rope = config.rope_of(attention.layer)
    pairs = join(*rotated.chunk(2, 1)) * (1.0 if rope is None else rope.amplitude)
    return torch.stack([torch.cat([pairs, rest], 1).amax(1), values.amax(1)])


def check_kv_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raises :class:`ModelError` where keys and values cannot be kept in FP8."""
    if dtype == torch.float16:
        raise ModelError("--kv-dtype fp8 needs a range that float16 lacks; use --dtype bfloat16, or leave --kv-dtype out.")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (CAPABILITY, torch.cuda.get_device_capability(device)))
        raise ModelError(
            f"--kv-dtype fp8 needs a GPU of compute capability {needed} or later, and this one has {found}; leave --kv-dtype out."
        )


class Format(Protocol):
    """A module that converts decoders."""

    def check_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raises :class:`~engine.models.files.ModelError` where the device cannot compute in the format."""

    def check_shapes(self, decoder: Model) -> None:
        """Raises :class:`~engine.models.files.ModelError` where the layers' matrices cannot be multiplied in the format."""

    def convert(self, layer: Layer) -> None:
        """Give a layer its quantised parts, without weights, in place of those it has."""

    def fill(self, layer: Layer, source: Layer) -> None:
        """Quantise the weights of ``source`` into ``layer``, which was converted and otherwise like it."""


FORMATS: dict[str, Format] = {"fp8": fp8, "int8": int8, "packed": packed}
"""Values of :attr:`~engine.settings.EngineSettings.quantize`, and ``packed``, which changes no numbers."""


def format_of(quantize: str | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """The format in which layers are served: ``quantize``, or else ``packed`` where that is faster; None for plain weights."""
    return quantize or ("packed" if packed.suits(device, dtype) else None)


def pack_head(decoder: Decoder, form: str | None) -> None:
    """Give the decoder a packed copy of its head, where ``form`` is a format of a CPU.

    With 8 rows, a product takes two thirds of the time. The plain weight stays, because embeddings, and logits of single tokens,
    are rows of it. oneDNN multiplies the copy wherever torch has oneDNN: a head exceeds the caches, and with few rows oneDNN
    reads such a copy faster (docs/benchmarks). A head in bfloat16 is packed where plain layers are.
    """
    weight = decoder.embed.weight
    gains = form == "packed" or (form == "int8" and (weight.dtype == torch.float32 or packed.suits(weight.device, weight.dtype)))
    if gains and decoder.config.lm_head:
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        decoder.packed_head = pack(decoder.head_weight.detach(), ONEDNN if has_onednn else None)


def arithmetic_of(dtype: torch.dtype, quantize: str | None, kv_dtype: str = "auto", weights: str | None = None) -> str:
    """:attr:`engine.wire.Info.arithmetic`. ``weights``: :attr:`Decoder.weight_format`."""
    parts = [str(dtype).removeprefix("torch.")] + ([] if weights is None else [weights])
    if quantize is not None:
        parts.append(f"matrix products in {quantize}" + (f" ({instructions()})" if quantize == "int8" else ""))
    if kv_dtype != "auto":
        parts.append(f"keys and values in {kv_dtype}")
    return ", ".join(parts)
