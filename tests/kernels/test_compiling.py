"""Every kernel compiles for Hopper with the shapes of real models, within its registers and shared memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kernels.hopper import SHARED_MEMORY, compiled

IMPORTS = """
from kernels.candidates import candidates_triton
from kernels.gelu_mul import gelu_mul_quantized_triton, gelu_mul_triton
from kernels.keep_thresholds import keep_thresholds_triton
from kernels.label_logprobs import label_logprobs_triton
from kernels.largest import token_logprobs_triton
from kernels.linear_qk_norm_rope import linear_qk_norm_rope_triton
from kernels.linear_silu_mul import linear_silu_mul_triton
from kernels.qk_norm_rope import qk_norm_rope_write_triton
from kernels.quantize import quantize_rows_triton
from kernels.rms_norm import add_rms_norm_quantized_triton, add_rms_norm_triton, rms_norm_quantized_triton, rms_norm_triton
from kernels.seeded_sampling import seeded_choice_triton, seeded_draw_triton
from kernels.silu_mul import silu_mul_quantized_triton, silu_mul_triton
from kernels.token_bits import exclude_triton_
"""


def _bf16(*shape: int) -> str:
    return f"torch.empty({shape}, dtype=torch.bfloat16)"


def _qk_norm_rope(heads: int, kv_heads: int, head_dim: int, normed: bool, rotated: int | None = None) -> str:
    weights = ", ".join([_bf16(head_dim) if normed else "None"] * 2)
    angles = ", ".join([f"torch.empty(4, {(rotated or head_dim) // 2})"] * 2)
    cache = ", ".join([_bf16(64, kv_heads, head_dim)] * 2)
    slots = "torch.zeros(4, dtype=torch.int64)"
    qkv = _bf16(4, heads + 2 * kv_heads, head_dim)
    return f"qk_norm_rope_write_triton({qkv}, {weights}, 1e-6, {angles}, {cache}, {slots})"


def _linear_qk_norm_rope(heads: int, kv_heads: int, head_dim: int, normed: bool, biased: bool, coded: bool = False) -> str:
    columns = (heads + 2 * kv_heads) * head_dim
    kind = "float8_e4m3fn" if coded else "bfloat16"
    x, weight = (f"torch.empty(({rows}, 1024), dtype=torch.{kind})" for rows in (2048, columns))
    norms = ", ".join([_bf16(head_dim) if normed else "None"] * 2)
    angles = f"torch.empty(2048, {head_dim // 2})"
    cache = _bf16(4096, kv_heads, head_dim)
    given = f"{x}, {weight}, {_bf16(columns) if biased else None}, {norms}, 1e-6, {angles}, {angles}, {cache}, {cache}"
    scales = f", x_scales=torch.empty(2048, 1), weight_scales=torch.empty({columns}, 1)" if coded else ""
    return f"linear_qk_norm_rope_triton({given}, torch.zeros(2048, dtype=torch.int64){scales})"


def _label_logprobs(rows: int, dtype: str, cap: float = 0.0) -> str:
    hidden, head = (f"torch.empty(({count}, 1024), dtype=torch.{dtype})" for count in (rows, 4096))
    return f"label_logprobs_triton({hidden}, {head}, torch.zeros(({rows}, 2), dtype=torch.int64), {cap})"


ELEMENTWISE = [
    f"rms_norm_triton({_bf16(4, 16, 128)}, {_bf16(128)}, 1e-6)",
    f"rms_norm_triton({_bf16(4, 8192)}, {_bf16(8192)}, 1e-6)",
    f"add_rms_norm_triton({_bf16(4, 1024)}, {_bf16(4, 1024)}, {_bf16(1024)}, 1e-6)",
    f"add_rms_norm_quantized_triton({_bf16(4, 8192)}, {_bf16(4, 8192)}, {_bf16(8192)}, 1e-6)",
    f"rms_norm_quantized_triton({_bf16(4, 1024)}, {_bf16(1024)}, 1e-6)",
    f"rms_norm_triton({_bf16(4, 2304)}, torch.empty(2304), 1e-6)",
    f"silu_mul_triton({_bf16(4, 6144)})",
    f"gelu_mul_triton({_bf16(4, 2 * 9216)})",
    f"gelu_mul_quantized_triton({_bf16(4, 2 * 9216)})",
    f"silu_mul_quantized_triton({_bf16(4, 2 * 18944)})",
    f"quantize_rows_triton({_bf16(4, 2048)})",
    _qk_norm_rope(16, 8, 128, normed=True),
    _qk_norm_rope(14, 2, 64, normed=False),
    _qk_norm_rope(24, 8, 128, normed=False, rotated=96),
]
PRODUCTS = [
    _label_logprobs(1000, "bfloat16"),
    _label_logprobs(1000, "bfloat16", 30.0),
    _label_logprobs(64, "bfloat16"),
    _label_logprobs(1000, "float32"),
]
FUSED_PRODUCTS = [
    f"linear_silu_mul_triton({_bf16(2048, 1024)}, {_bf16(6144, 1024)})",
    f"linear_silu_mul_triton({_bf16(2048, 3584)}, {_bf16(2 * 18944, 3584)}, {_bf16(2 * 18944)}, gelu=True)",
    _linear_qk_norm_rope(16, 8, 128, normed=True, biased=False),
    _linear_qk_norm_rope(14, 2, 64, normed=False, biased=True),
    _linear_qk_norm_rope(28, 4, 128, normed=False, biased=True),
]
CODED_PRODUCT = _linear_qk_norm_rope(16, 8, 128, normed=True, biased=False, coded=True)
SMALL_PRODUCT = _label_logprobs(1, "float16")
LOGITS, NUMBERS, LONGS = "torch.empty(4, 151936)", "torch.empty(4)", "torch.empty(4, dtype=torch.int64)"
BITS = "torch.empty((4, 4748), dtype=torch.int32)"
SAMPLING = [
    f"candidates_triton({LOGITS}, {NUMBERS}, {LONGS}, {NUMBERS}, {NUMBERS}, 8)",
    f"token_logprobs_triton({LOGITS}, {LONGS}, 5)",
    f"keep_thresholds_triton({LOGITS}, {NUMBERS}, {LONGS}, {NUMBERS}, {NUMBERS})",
    f"seeded_draw_triton({LOGITS}, {NUMBERS}, {LONGS}, None)",
    f"seeded_draw_triton({LOGITS}, {NUMBERS}, {LONGS}, {NUMBERS})",
    f"exclude_triton_({LOGITS}, {LONGS}, {BITS})",
]
CHOICE = "seeded_choice_triton(torch.empty(4, 8), torch.empty((4, 8), dtype=torch.int64), torch.empty(4, dtype=torch.int64))"
MOST_CANDIDATES = f"candidates_triton({LOGITS}, {NUMBERS}, {LONGS}, {NUMBERS}, {NUMBERS}, 64)"


def compiled_within_limits(*launches: str, spilled: int = 0) -> list[list[dict[str, Any]]]:
    """Return the result of :func:`compiled`, after checks: no kernel needs more shared memory than there is, or spills more than
    ``spilled`` bytes of registers a thread."""
    found = compiled(IMPORTS, *launches)
    for kernels in found:
        assert kernels
        for kernel in kernels:
            assert kernel["local"] <= spilled, kernel["name"]
            assert kernel["shared"] <= SHARED_MEMORY, kernel["name"]
    return found


@pytest.mark.slow
def test_sampling_compiles_for_hopper() -> None:
    """For a large vocabulary; logits are loaded 16 bytes at a time."""
    found = compiled_within_limits(*SAMPLING, CHOICE)
    assert [len(kernels) for kernels in found] == [2, 2, 5, 1, 1, 1, 1]
    for kernels in found[:-2]:
        assert re.search(r"ld\.global[.\w]*\.v4\.b32", kernels[0]["ptx"]), kernels[0]["name"]


@pytest.mark.slow
def test_most_candidates_compile_for_hopper() -> None:
    compiled_within_limits(MOST_CANDIDATES)


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    found = compiled_within_limits(*ELEMENTWISE, *PRODUCTS, SMALL_PRODUCT)
    for (kernel,), launch in zip(found, ELEMENTWISE, strict=False):
        assert re.search(r"ld\.global[.\w]*\.v4\.b32", kernel["ptx"]), f"no loads of 16 bytes: {launch}"
        assert "quantize" not in launch or "div.rn.f32" in kernel["ptx"], f"scales are not those of the reference: {launch}"
    *wide, _, small = (kernels[0]["ptx"] for kernels in found[len(ELEMENTWISE) :])
    assert all("wgmma.mma_async" in ptx for ptx in wide)
    assert "mma.sync" in small


@pytest.mark.slow
def test_fused_products_compile_for_hopper() -> None:
    """On the tensor cores of Hopper, which load through tensor descriptors. That of codes spills some registers once a tile with
    Triton 3.7, and none with 3.6."""
    for (kernel,) in compiled_within_limits(*FUSED_PRODUCTS) + compiled_within_limits(CODED_PRODUCT, spilled=128):
        assert "wgmma.mma_async" in kernel["ptx"], kernel["name"]
        assert "cp.async.bulk.tensor." in kernel["ptx"], kernel["name"]
        assert re.search(r"st\.global[.\w]*\.v4\.b32", kernel["ptx"]), f"no stores of 16 bytes: {kernel['name']}"
