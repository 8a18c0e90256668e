"""The linear layer: on a CPU in float32 through the faster of two libraries, oneDNN or MKL, and in bfloat16 through oneDNN.

Torch multiplies float32 matrices with MKL, which keeps to AVX2 on processors that are not Intel's. On one core of an AMD EPYC
(Zen 5) with AVX-512, [256, 512] by [512, 3072]: MKL 61-67 GFLOP/s, oneDNN 130; over lengths that vary from call to call 2.5 times
as many tokens a second. On Intel's own (Sapphire Rapids) MKL is the faster one for nearly all shapes (docs/benchmarks,
"Float32 products on a CPU"). So :func:`library` measures one product when a process first multiplies.

Both libraries rearrange weights into layouts of their own in each call, unless :func:`pack` has done so before.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from yardstick_llm.kernels.int8 import Panels, int8_linear

logger = logging.getLogger(__name__)

ONEDNN, MKL = "oneDNN", "MKL"

BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Any of these multiplies bfloat16."""

PACKED_ROWS = 256
"""Rows of the input that a packed weight is laid out for; products of other numbers of rows take it as well. MKL's layout for 8
rows makes a product of 128 rows half as fast, the one for 256 rows loses with no number of rows."""

PROBED = 8, 512, 1024
"""Rows, columns and output columns of the product that :func:`library` measures: on each processor in docs/benchmarks, one
library is at least 1.6 times as fast here, and on a loaded machine 1.18 times."""
PROBES = 100
"""Times that each library multiplies. With 20 the slower one won in 2 of 17 starts at a load of 10, with 100 in none of 10."""


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by itself; others emulate it."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in BFLOAT16_INSTRUCTIONS)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A float32 or bfloat16 weight on a CPU in a library's own layout."""

    library: str
    layout: Tensor
    """Only the library reads it. MKL reserves 8 MiB more than the weight has, which it never touches. It must not be copied: the
    layout depends on its address."""
    like: Tensor
    """[out, in], all of them one element: the shape, as MKL's operator wants it."""

    def __len__(self) -> int:
        return len(self.like)


Weight: TypeAlias = Tensor | PackedWeight | Panels
"""A weight of :func:`linear`."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias``. x: [rows, in]; weight: [out, in]; bias: [out]. -> [rows, out]"""
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight, bias)
    if isinstance(weight, Panels):
        return int8_linear(x, weight, bias)
    if x.device.type != "cpu" or x.dtype != torch.float32 or library() == MKL:
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _product(x, weight, bias)


@functools.cache
def library() -> str:
    """The library that multiplies float32 matrices on this CPU: the only one that torch has, or the faster one.

    It is measured once in a process, in 50 ms of its CPU time. The libraries differ in rounding only, as processors and numbers of
    rows do, so the choice is not part of a model's fingerprint.
    """
    has_onednn, has_mkl = torch.backends.mkldnn.is_available(), torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not (has_onednn and has_mkl):
        return ONEDNN if has_onednn else MKL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that its time is the thread's, whatever else runs on the machine
    try:
        ratio = _onednn_time_ratio()
    finally:
        torch.set_num_threads(threads)
    found = MKL if ratio > 1 else ONEDNN
    logger.info("float32 matrix products: %s; oneDNN takes %.2f times as long as MKL", found, ratio)
    return found


@torch.no_grad()
def _onednn_time_ratio() -> float:
    """oneDNN's CPU time divided by MKL's for the probed product."""
    rows, size, out = PROBED
    x = torch.full((rows, size), 0.5)
    weights = [pack(torch.full((out, size), 0.5), name) for name in (ONEDNN, MKL)]
    taken = [[_seconds(functools.partial(packed_linear, x, weight)) for weight in weights] for _ in range(1 + PROBES)]
    onednn, mkl = (min(times[place] for times in taken[1:]) for place in range(2))  # the first ones prepare code and memory
    return onednn / mkl


def _seconds(multiply: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    multiply()
    return time.thread_time() - start


def pack(weight: Tensor, into: str | None = None) -> PackedWeight:
    """``weight`` [out, in], float32 or bfloat16, in the layout of a library. In float32 that is :func:`library`, or what ``into``
    names."""
    name = ONEDNN if weight.dtype != torch.float32 else library() if into is None else into
    reorder = torch.ops.mkl._mkl_reorder_linear_weight if name == MKL else torch.ops.mkldnn._reorder_linear_weight
    return PackedWeight(name, reorder(weight, PACKED_ROWS), torch.zeros(1, 1).expand(weight.shape))


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` with a weight from :func:`pack`; no gradients. x: [rows, in] in the weight's dtype -> [rows, out]"""
    if weight.library == MKL:
        # The last argument says for how many rows the weight was packed; with another number, torch would multiply ``like``.
        return torch.ops.mkl._mkl_linear(x, weight.layout, weight.like, bias, len(x))  # type: ignore[no-any-return]
    return _product(x, weight.layout, bias)


def packed_gelu(x: Tensor, weight: PackedWeight, bias: Tensor | None, *, tanh: bool) -> Tensor:
    """GELU of :func:`packed_linear`, in one operation where oneDNN multiplies. ``tanh``: GELU is approximated by tanh."""
    if weight.library == MKL:
        return torch.nn.functional.gelu(packed_linear(x, weight, bias), approximate="tanh" if tanh else "none")
    return _product(x, weight.layout, bias, "gelu", "tanh" if tanh else "none")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none", form: str = "") -> Tensor:
    """oneDNN's inner product, and the operation that follows it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], form)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """torch has no derivative for the operator, so here it is, in the same products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t()) if needs_x else None,
            _product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
