"""Keys and values as FP8 codes: their own operations, and the kernels that write and read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.test_paged_attention import MIXED, layout_of, tensors
from tests.kernels.test_qk_norm_rope import inputs
from yardstick_llm.kernels import kv_codes
from yardstick_llm.kernels.paged_attention import paged_attention_reference, paged_attention_triton
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write_reference, qk_norm_rope_write_triton
from yardstick_llm.kernels.quantize import FP8

SCALES = [[0.25, 2.0], [0.5, 0.0625]]
"""Scales of the keys and of the values of two heads."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_decoded(dtype: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)[None, None]
    codes = codes[codes & 0x7F != 0x7F].view(FP8)  # not a number
    assert torch.equal(kv_codes.decode(codes, dtype), codes.to(dtype))


def test_codes_are_the_nearest_and_too_large_numbers_are_cut_off() -> None:
    x = torch.randn(50, 2, 32) * torch.tensor([1.0, 1e3])[:, None]
    scales = torch.tensor([2.0**-5, 2.0])
    found = kv_codes.decode(kv_codes.encode(x, scales), torch.float32) * scales[:, None]
    assert (found - x.clamp(-448 * scales[:, None], 448 * scales[:, None])).abs().le(x.abs() / 16 + scales[:, None] / 1024).all()
    assert found[:, 1].abs().max() == 896


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
def test_what_is_rounded_to_codes(normed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in float32, because the interpreter does not carry when it rounds to FP8. Too large numbers are cut off."""
    monkeypatch.setattr("yardstick_llm.kernels.qk_norm_rope.FP8", torch.float32)
    given = inputs(5, 6, 2, 16, torch.float32, device, normed)
    given.qkv[0] *= 1000
    scales = torch.tensor(SCALES, device=device)
    plain = given._replace(keys=given.keys.clone(), values=given.values.clone())
    q, expected = qk_norm_rope_write_triton(*given, scales), qk_norm_rope_write_reference(*plain)
    torch.testing.assert_close(q, expected * scales[0].repeat_interleave(3)[:, None], atol=1e-5, rtol=1e-5)
    for found, kept, each in ((given.keys, plain.keys, scales[0]), (given.values, plain.values, scales[1])):
        rows = given.slots
        torch.testing.assert_close(found[rows], (kept[rows] / each[:, None]).clamp(-448, 448), atol=1e-4, rtol=1e-5)
    assert given.values.abs().max() == 448


def coded(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, which are multiplied by the scales of their keys, codes of keys and values, and the scales of the values."""
    q, keys, values = tensors(MIXED, device, dtype, group=3, kv_heads=2)
    scales = torch.tensor(SCALES, device=device)
    q = q * scales[0].repeat_interleave(3)[:, None].to(dtype)
    return q, kv_codes.encode(keys, scales[0]), kv_codes.encode(values, scales[1]), scales[1].contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_attention_reads_codes(dtype: torch.dtype, device: torch.device) -> None:
    """As if what they stand for was read."""
    q, keys, values, scales = coded(device, dtype)
    layout, tolerance = layout_of(MIXED, q, keys), 1e-5 if dtype == torch.float32 else 1.6e-2
    expected = paged_attention_reference(q, keys.to(dtype), values.to(dtype) * scales[:, None].to(dtype), layout)
    for operation in (paged_attention_triton, paged_attention_reference):
        torch.testing.assert_close(operation(q, keys, values, layout, scales), expected, atol=tolerance, rtol=tolerance)


def test_arguments_are_checked(device: torch.device) -> None:
    q, keys, values, _ = coded(device)
    layout = layout_of(MIXED, q, keys)
    with pytest.raises(ValueError, match=r"keys is torch\.float8_e4m3fn, where torch\.float32"):
        paged_attention_triton(q, keys, values, layout)
