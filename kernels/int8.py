"""Products of matrices in 8-bit integers on a CPU: of codes of weights, of 8 or 4 bits, and codes of activations.

``x ≈ codes · scale`` with ``scale = max|x| / 127``. Sums of products of codes are exact, so that a row's result does not depend on
the rows beside it. With VNNI, loops multiply (:func:`kernels.native.multiply_codes`): groups of columns of a weight have a scale,
and so have the same groups of a row of activations. With AMX, oneDNN multiplies, where a weight has one scale for each output, and
a row of activations one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from yardstick_llm.kernels.row_chunks import in_threads, share
from yardstick_llm.kernels.runtime import flat, loops

MIN_PEAK = 1e-10
"""A row of zeros counts as one with a peak of this: a scale is never zero."""

MAX_CODE = 127.0
ZERO = 128
"""Code of zero in activations, which are unsigned, as the instructions want them."""

MOST_COLUMNS = 65_536
"""Longest rows whose sums of products of codes, 255 · 127 each, fit 32 bits."""

UNGATED, GATE_FIRST, GATE_SECOND = range(3)
"""Whether a feed-forward layer has a gate, and which half of its first product that is."""

INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni")
"""Any of these multiplies unsigned by signed bytes and sums in 32 bits; the fastest first."""
PANEL_INSTRUCTIONS = INSTRUCTIONS[1:]
"""Loops multiply where one of these is :func:`instructions`; otherwise oneDNN does."""
FEW_ROWS = 128
"""Most rows that are quantised and multiplied in one call on one thread."""
PART = 1 << 18
"""Codes of activations, times pairs of panels, for which a second thread is worth its start."""


def instructions() -> str | None:
    """The first of :data:`INSTRUCTIONS` that this processor has; None without any."""
    found = torch.cpu.get_capabilities()
    return next((name for name in INSTRUCTIONS if found.get(name)), None)


class Projection(Protocol):
    """A linear layer, whose weight has the form that the function takes."""

    weight: Any

    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The codes of a weight in oneDNN's own layout."""

    codes: Tensor
    """[out, in] int8, opaque"""
    scales: Tensor
    """[out] float32"""
    zeros: Tensor
    """[out] int32: the operator wants a zero point for each channel."""


@dataclass(frozen=True, slots=True)
class Panels:
    """The codes of a weight as the loops multiply them.

    A panel has as many outputs as a register has lanes, and four columns of each side by side. Panels come in pairs, so ``width``
    is at least ``out``. An element is ``((code - zero) · scale + offset) · factor``.
    """

    codes: Tensor
    """uint8: [panels, in / 4, lanes, 4]. Of 4 bits: [panels, in / 8, lanes, 4], the low halves for four columns, and the high ones
    for the next four."""
    scales: Tensor
    """[panels, groups, 1 or 2, lanes] float16: scales, and offsets where there are some"""
    factors: Tensor
    """[width] float32: of outputs. Quotients with them fit float16."""
    out: int
    group: int
    """Columns of a group."""
    halved: bool
    """Whether codes have 4 bits."""
    shifted: bool
    """Whether there are offsets; ``zero`` is 0 then."""
    zero: int
    """Code that stands for 0."""
    arrays: tuple[Any, ...]
    """Its parts, as the loops take them."""
    nothing: npt.NDArray[Any]
    """[width], zeros: a bias"""

    def __len__(self) -> int:
        return self.out

    @property
    def width(self) -> int:
        """Outputs of all panels."""
        return len(self.factors)

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.scales.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether a row has one scale, codes have 8 bits, and no panel has room for more outputs than there are."""
        return self.groups == 1 and not (self.halved or self.shifted) and self.width == self.out


Weight = PackedWeight | Panels


class Quantized(NamedTuple):
    """Rows of activations in codes."""

    codes: Tensor
    """[rows, in] uint8; their zero is :data:`ZERO` for oneDNN, and 0 in two's complement for the loops."""
    scales: Tensor
    """[rows, groups] float32"""
    sums: Tensor
    """[rows, groups] int32, of codes"""


def takes(columns: int, group: int, bits: int) -> bool:
    """Whether :class:`Panels` can hold rows of ``columns`` codes of ``bits``, in groups of ``group`` codes."""
    return columns % group == 0 and group % (8 if bits == 4 else 4) == 0 and group <= MOST_COLUMNS


def pack(weight: Tensor) -> Weight:
    """weight: [out, in], in any dtype, on a CPU."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_(min=MIN_PEAK) / MAX_CODE
    return pack_codes((wide / scales[:, None]).round_().to(torch.int8), scales)


def pack_codes(codes: Tensor, scales: Tensor) -> Weight:
    """codes: [out, in] int8; scales: [out] float32."""
    if instructions() in PANEL_INSTRUCTIONS and takes(codes.shape[1], codes.shape[1], 8):
        return pack_panels(codes, scales[:, None])
    return PackedWeight(torch.ops.onednn.qlinear_prepack(codes, None), scales, torch.zeros(codes.shape[0], dtype=torch.int32))


def pack_panels(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, offsets: Tensor | None = None, bits: int = 8) -> Panels:
    """codes: [out, in] int8 or uint8, of 4 bits uint8 and less than 16; the others: [out, groups] float32, as in
    :class:`kernels.weight_only.Codes`."""
    (out, columns), groups, lanes = codes.shape, scales.shape[1], loops().LANES
    zero = 0 if zeros is None else int(zeros.flatten()[0])
    if zeros is not None and not (zero >= 0 and bool((zeros == zero).all())):
        zero, offsets = 0, -zeros * scales if offsets is None else offsets - zeros * scales
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8) ^ ZERO
        if offsets is None:
            zero += ZERO
        else:
            offsets = offsets - ZERO * scales
    parts = [scales] if offsets is None else [scales, offsets - zero * scales]
    zero = zero if offsets is None else 0
    factors = scales.abs().amax(1)
    if offsets is not None:
        factors = torch.maximum(factors, parts[1].abs().amax(1) / 256)
    factors = factors.clamp(min=MIN_PEAK)
    more = -out % (2 * lanes)
    padded = pad(torch.stack(parts, 1) / factors[:, None, None], (0, 0, 0, 0, 0, more)).to(torch.float16)
    laid = _in_panels(pad(codes, (0, 0, 0, more)), lanes, halved=bits == 4)
    of_groups, factors = padded.view(-1, lanes, len(parts), groups).permute(0, 3, 2, 1).contiguous(), pad(factors, (0, more))
    arrays = flat(laid), flat(of_groups.view(torch.int16)), zero, flat(factors)
    nothing = np.zeros(len(factors), np.float32)
    return Panels(laid, of_groups, factors, out, columns // groups, bits == 4, offsets is not None, zero, arrays, nothing)


def _in_panels(codes: Tensor, lanes: int, *, halved: bool) -> Tensor:
    panels = codes.view(codes.shape[0] // lanes, lanes, -1, 4).transpose(1, 2)
    if not halved:
        return panels.contiguous()
    low, high = panels[:, ::2], panels[:, 1::2]
    return torch.bitwise_or(low, high << 4).contiguous()


def quantize_rows(x: Tensor, weight: Weight) -> Quantized:
    """x: [rows, in] float32 or bfloat16, in codes for products with ``weight``. oneDNN's scales are rounded to x's dtype."""
    rows, size = x.shape
    found, given = _room(rows, size, weight), flat(x.float())
    group, rounded, zero = _form(weight, size, x.dtype)
    quantize, to = loops().quantize, [flat(part) for part in found]
    in_threads(lambda span: quantize(given, size, group, rounded, zero, *to, span.start, min(span.stop, rows)), rows, 2 * size)
    return found


def _form(weight: Weight, size: int, dtype: torch.dtype) -> tuple[int, bool, int]:
    """Columns of a group of activations, whether scales are rounded, and the code of zero."""
    return (weight.group, False, 0) if isinstance(weight, Panels) else (size, dtype != torch.float32, ZERO)


def _room(rows: int, size: int, weight: Weight) -> Quantized:
    groups = weight.groups if isinstance(weight, Panels) else 1
    codes, scales = torch.empty((rows, size), dtype=torch.uint8), torch.empty((rows, groups))
    return Quantized(codes, scales, torch.empty((rows, groups), dtype=torch.int32))


def int8_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` in codes. x: [rows, in] float32 or bfloat16; bias: [out] of x's dtype. -> [rows, out], the same.

    In bfloat16, oneDNN's product is rounded without the scales of the rows, and again with them.
    """
    rows = x.shape[0]
    if isinstance(weight, Panels) and rows <= FEW_ROWS and x.dtype == torch.float32 and torch.get_num_threads() == 1:
        return _multiplied_few(x, weight, bias)
    return _scaled_product(quantize_rows(x, weight), weight, bias, x.dtype)


def int8_activated(x: Tensor, into: Projection, down: Projection, function: str, gated: int, size: int) -> Tensor:
    """``down(function(into(x)))``: a feed-forward layer, whose activations are computed in float32 and quantised.

    x: [rows, in] float32 or bfloat16 -> [rows, in]. ``function``: gelu, gelu_tanh, relu, silu or tanh. ``gated``: :data:`UNGATED`,
    or the half of the product that it is applied to. ``size``: columns between the layers.
    """
    rows, native, bias = x.shape[0], loops(), None if into.bias is None else into.bias.float()
    given = quantize_rows(x, into.weight)
    if isinstance(into.weight, Panels):
        product, scales, bias = _multiplied(given, into.weight, bias), None, None
    else:  # in units of the scales
        scales = given.scales.to(x.dtype).float()
        product = _product(given.codes, into.weight, x.dtype).float()
    inner = _room(rows, size, down.weight)
    group, rounded, zero = _form(down.weight, size, x.dtype)
    before = flat(product), flat(scales), flat(bias), getattr(native, function.upper()), gated, size, group, rounded, zero
    to = [flat(part) for part in inner]
    in_threads(lambda span: native.activate(*before, *to, span.start, min(span.stop, rows)), rows, 3 * product.shape[1])
    return _scaled_product(inner, down.weight, down.bias, x.dtype)


def _product(codes: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The product of rows of codes, in units of their scales. -> [rows, out] of ``dtype``."""
    return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
        codes, 1.0, ZERO, weight.codes, weight.scales, weight.zeros, None, 1.0, 0, dtype, "none", [], ""
    )


def _multiplied(x: Quantized, weight: Panels, bias: Tensor | None) -> Tensor:
    """-> [rows, out] float32, with the bias"""
    width, multiply = weight.width, loops().multiply_codes
    out = torch.empty(x.codes.shape[0], width)
    given = flat(x.codes).view("int32"), flat(x.scales), flat(x.sums), *weight.arrays, _bias(bias, weight), flat(out)
    shape = x.codes.shape[0], width, weight.groups, weight.group, weight.halved, weight.shifted
    pairs = width // (2 * loops().LANES)
    parts = min(pairs, 4 * torch.get_num_threads(), max(1, pairs * x.codes.numel() // PART))
    if parts == 1:
        multiply(*given, *shape, 0, pairs)
    else:
        spans = [slice(pairs * part // parts, pairs * (part + 1) // parts) for part in range(parts)]
        share(lambda span: multiply(*given, *shape, span.start, span.stop), spans)
    return out if weight.width == weight.out else out[:, : weight.out].contiguous()


def _multiplied_few(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """:func:`int8_linear` by one call on the calling thread; of a few rows, calls take longer than products."""
    rows = x.shape[0]
    out = torch.empty(rows, weight.width)
    form = weight.groups, weight.group, weight.halved, weight.shifted
    loops().multiply_few(flat(x), *weight.arrays, _bias(bias, weight), flat(out), rows, *form)
    return out if weight.width == weight.out else out[:, : weight.out].contiguous()


def _bias(bias: Tensor | None, weight: Panels) -> npt.NDArray[Any]:
    """[width] float32"""
    found = weight.nothing if bias is None else flat(bias.float())
    return found if len(found) == weight.width else np.pad(found, (0, weight.width - len(found)))


def _scaled_product(x: Quantized, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Panels):
        return _multiplied(x, weight, bias).to(dtype)
    product, scales = _product(x.codes, weight, dtype), x.scales.to(dtype)
    return product.mul_(scales) if bias is None else torch.addcmul(bias, product, scales, out=product)
