"""Products with weights in codes: of 4 and 8 bits with scales of groups, and of FP8 with scales of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.block_scaled import block_scaled_linear_reference, block_scaled_linear_triton, quantize_groups
from yardstick_llm.kernels.quantize import FP8
from yardstick_llm.kernels.weight_only import (
    CHUNK,
    Codes,
    dense,
    grouped_weight_only_linear_reference,
    grouped_weight_only_linear_triton,
    half_of,
    pack_halves,
    unpack_halves,
    weight_only_linear_reference,
    weight_only_linear_triton,
)

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative errors of products."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(out: int, columns: int, group: int, bits: int, shift: str) -> tuple[Codes, Tensor]:
    """A weight in float32, and what it stands for."""
    generator = torch.Generator().manual_seed(out + columns)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (out, columns), generator=generator)
    scales = torch.rand(out, columns // group, generator=generator) / 50 + 0.01
    zeros = torch.randint(1, 16, scales.shape, generator=generator).float() if shift == "zeros" else None
    offsets = -torch.rand(scales.shape, generator=generator) / 10 if shift == "offsets" else None
    exact = dense(codes, scales, zeros, offsets)
    if bits == 8:
        return Codes(codes.to(torch.int8), scales, zeros, offsets), exact
    half = half_of(columns, group)
    assert half is not None
    packed = pack_halves(codes.to(torch.uint8), half)
    assert torch.equal(unpack_halves(packed, half).long(), codes)
    return Codes(packed, scales, zeros, offsets, half), exact


def to(weight: Codes, device: torch.device, dtype: torch.dtype) -> Codes:
    parts = (None if part is None else part.to(device, dtype) for part in (weight.scales, weight.zeros, weight.offsets))
    return Codes(weight.codes.to(device), *parts, weight.half)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bits", "group", "columns"), [(4, 32, 64), (4, 64, 128), (4, 128, 256), (4, 192, 192), (8, 16, 48), (8, 128, 256)]
)
@pytest.mark.parametrize("shift", ["none", "zeros", "offsets"])
def test_tiles_are_made_dense(bits: int, group: int, columns: int, shift: str, device: torch.device) -> None:
    weight, exact = codes_of(40, columns, group, bits, shift)
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter does not multiply bfloat16
    for rows, dtype, bias in ((3, torch.float32, True), (70, half, False), (0, half, True), (17, half, True)):
        x = random(rows, columns).to(device, dtype)
        added = random(40, seed=1).to(device, dtype) if bias else None
        expected = x.float() @ exact.to(device, dtype).float().t() + (0 if added is None else added.float())
        given = to(weight, device, dtype)
        for operation in (weight_only_linear_triton, weight_only_linear_reference):
            found = operation(x, given, added)
            assert found.dtype == dtype
            assert (found.float() - expected).norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
@pytest.mark.parametrize("by_pair", [False, True])
def test_experts(bits: int, group: int, by_pair: bool, device: torch.device) -> None:
    """One of 5 experts has no pairs, and some pairs are those of experts that are not here."""
    columns, size, chosen, count = 40, 128, 2, 5
    weight, exact = codes_of(count * columns, size, group, bits, "zeros")
    for rows in (3, 300):
        experts = torch.randint(0, count, (rows, chosen), generator=torch.Generator().manual_seed(rows))
        experts[experts == 2], experts[0] = count, torch.tensor([1, 0])
        x = random(rows * chosen if by_pair else rows, size)
        each = x if by_pair else x.repeat_interleave(chosen, 0)
        flat = experts.flatten()
        here = flat < count
        expected = torch.einsum("ps,pcs->pc", each[here], exact.view(count, columns, size)[flat[here]])
        given = to(weight, device, torch.float32)
        for operation in (grouped_weight_only_linear_triton, grouped_weight_only_linear_reference):
            found = operation(x.to(device), given, experts.to(device), count, by_pair=by_pair).cpu()[here]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_codes_of_fp8(device: torch.device) -> None:
    codes, scales, x = random(40, 128).to(FP8), random(40, 2, seed=1).abs(), random(5, 128, seed=2)
    weight = to(Codes(codes, scales), device, torch.float32)
    expected = x @ dense(codes, scales).t()
    for operation in (weight_only_linear_triton, weight_only_linear_reference):
        torch.testing.assert_close(operation(x.to(device), weight).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_large_weights_are_made_dense_in_parts() -> None:
    columns = CHUNK // 64
    weight, exact = codes_of(150, columns, 128, 4, "zeros")
    x = random(2, columns)
    torch.testing.assert_close(weight_only_linear_reference(x, weight), x @ exact.t(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("problem", ["group", "dtype", "shape"])
def test_what_the_kernel_does_not_take(problem: str, device: torch.device) -> None:
    weight, _ = codes_of(16, 96, 8 if problem == "group" else 32, 8, "none")
    x = random(2, 64 if problem == "shape" else 96).to(device, torch.float64 if problem == "dtype" else torch.float32)
    with pytest.raises(ValueError, match="expected"):
        weight_only_linear_triton(x, to(weight, device, torch.float32))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 64), (128, 128), (128, 256)])
@pytest.mark.parametrize("rows", [1, 20])
def test_blocks_of_fp8(height: int, width: int, rows: int, device: torch.device) -> None:
    columns, out = 512, 80
    weight = random(out, columns).to(FP8).to(device)
    scales = (random(-(-out // height), columns // width, seed=2).abs() + 0.1).to(device)
    x, bias = random(rows, columns, seed=3).to(device, torch.bfloat16), random(out).to(device, torch.bfloat16)
    operands = quantize_groups(x, width), weight, scales, (height, width), bias, torch.bfloat16
    found, expected = block_scaled_linear_triton(*operands), block_scaled_linear_reference(*operands)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.1)
    of_codes = scales.repeat_interleave(height, 0)[:out].repeat_interleave(width, 1)
    exact = x.float() @ (weight.float() * of_codes).t() + bias.float()
    assert 1e-4 < (found.float() - exact).norm() / exact.norm() < 3e-2
    with pytest.raises(ValueError, match="where one of"):
        block_scaled_linear_triton(operands[0], weight, scales, (height, 48), None, torch.bfloat16)
