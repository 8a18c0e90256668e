"""Formats of the weights of a decoder's layers: 8 bits, or the model's dtype as the library that multiplies wants it."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.models.decoder import Decoder, DecoderLayer
from engine.models.formats import fp8, int8, packed
from kernels.int8 import instructions
from kernels.linear import ONEDNN, pack


class Format(Protocol):
    """A module that converts decoders."""

    def check_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raises :class:`~engine.models.files.ModelError` where the device cannot compute in the format."""

    def check_shapes(self, decoder: Decoder) -> None:
        """Raises :class:`~engine.models.files.ModelError` where the layers' matrices cannot be multiplied in the format."""

    def convert(self, layer: DecoderLayer) -> None:
        """Give a layer its quantised parts, without weights, in place of those it has."""

    def fill(self, layer: DecoderLayer, source: DecoderLayer) -> None:
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


def arithmetic_of(dtype: torch.dtype, quantize: str | None, kv_dtype: str = "auto") -> str:
    """:attr:`engine.wire.Info.arithmetic`."""
    parts = [str(dtype).removeprefix("torch.")]
    if quantize is not None:
        parts.append(f"matrix products in {quantize}" + (f" ({instructions()})" if quantize == "int8" else ""))
    if kv_dtype != "auto":
        parts.append(f"keys and values in {kv_dtype}")
    return ", ".join(parts)
