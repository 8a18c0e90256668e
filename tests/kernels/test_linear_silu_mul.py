"""The product with gate and up in one kernel with the gate: against the reference in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.linear_silu_mul import fits, linear_silu_mul_reference, linear_silu_mul_triton
from yardstick_llm.kernels.product_tiles import Tiles, is_hopper
from yardstick_llm.kernels.quantize import FP8, quantize_rows_reference

SMALL = Tiles(rows=16, columns=64, step=16, warps=4, group=2)
TILES = {
    "descriptors": SMALL,
    "pointers": Tiles(rows=16, columns=64, step=16, warps=4, group=2, tma=False),
    "a program a tile": Tiles(rows=16, columns=64, step=16, warps=4, group=2, resident=0),
}
"""Small ones, so that a few rows are several tiles, some of them partly outside."""


def inputs(rows: int, size: int, columns: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, size), (2 * columns, size), (2 * columns,)))
    return x.to(device, dtype), (weight / size**0.5).to(device, dtype), bias.to(device, dtype)


@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize(("gelu", "biased"), [(False, True), (True, False)], ids=["silu, biased", "gelu"])
@pytest.mark.parametrize("shape", [(1, 16, 32), (53, 64, 80), (70, 48, 136), (0, 16, 32)], ids=str)
def test_kernel(shape: tuple[int, int, int], biased: bool, gelu: bool, tiles: Tiles, device: torch.device) -> None:
    x, weight, bias = inputs(*shape, device, torch.float16)
    found = linear_silu_mul_triton(x, weight, bias if biased else None, gelu=gelu, tiles=tiles)
    expected = linear_silu_mul_reference(x.float(), weight.float(), bias.float() if biased else None, gelu=gelu)
    assert found.shape == (shape[0], shape[2])
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


def test_rows_of_a_larger_tensor(device: torch.device) -> None:
    """Rows beyond the given ones do not reach the result, whatever they are."""
    x, weight, _ = inputs(40, 32, 48, device, torch.float16)
    x[19:] = torch.nan
    for tiles in TILES.values():
        expected = linear_silu_mul_reference(x[:19].float(), weight.float())
        found = linear_silu_mul_triton(x[:19], weight, tiles=tiles)
        torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


def test_chosen_tiles_in_float32(device: torch.device) -> None:
    x, weight, bias = inputs(20, 32, 40, device, torch.float32)
    expected = linear_silu_mul_reference(x, weight, bias)
    torch.testing.assert_close(linear_silu_mul_triton(x, weight, bias), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize(("gelu", "biased"), [(False, True), (True, False)], ids=["silu, biased", "gelu"])
def test_products_of_codes(biased: bool, gelu: bool, tiles: Tiles, device: torch.device) -> None:
    x, weight, bias = inputs(53, 64, 80, device, torch.bfloat16)
    given = codes(x, weight, bias if biased else None)
    step = 32 if device.type == "cuda" else 16
    tiles = Tiles(64, 64, step, warps=4, group=2, tma=tiles.tma, resident=tiles.resident)
    found = linear_silu_mul_triton(*given, gelu=gelu, tiles=tiles)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, linear_silu_mul_reference(*given, gelu=gelu), atol=3e-2, rtol=3e-2)


def codes(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The operation's arguments with codes and scales."""
    (x, x_scales), (weight, weight_scales) = quantize_rows_reference(x), quantize_rows_reference(weight)
    return x, weight, bias, x_scales, weight_scales


@pytest.mark.parametrize("coded", [False, True], ids=["bfloat16", "codes"])
@pytest.mark.parametrize("rows", [1024, 2000, 8192])
def test_chosen_tiles_on_a_gpu(rows: int, coded: bool, device: torch.device) -> None:
    """Qwen3-0.6B's feed-forward layer, as captured in a CUDA graph and replayed."""
    if device.type != "cuda" or not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    x, weight, bias = inputs(rows, 1024, 3072, device, torch.bfloat16)
    given = codes(x, weight, bias) if coded else (x, weight, bias)
    assert fits(*given[:3])
    linear_silu_mul_triton(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear_silu_mul_triton(*given)
    raw = given[0].view(torch.uint8)  # CUDA flips no codes
    raw.copy_(raw.flip(0))
    graph.replay()
    wide, most = (given, 3e-2) if coded else (tuple(each.float() for each in given), 1.6e-2)
    torch.testing.assert_close(found.float(), linear_silu_mul_reference(*wide).float(), atol=most, rtol=most)


def test_what_fits(device: torch.device) -> None:
    """Few rows and float32 do not; elsewhere than on a Hopper GPU nothing does."""
    x, weight, _ = inputs(1024, 64, 128, device, torch.float16)
    assert fits(x, weight) == (device.type == "cuda" and is_hopper(device))
    assert not fits(x[:1023], weight)
    assert not fits(x.float(), weight.float())
    assert not fits(x, weight.requires_grad_())


def test_arguments_are_checked(device: torch.device) -> None:
    x, weight, bias = inputs(3, 16, 8, device, torch.float32)
    with pytest.raises(ValueError, match=r"weight has shape \[15, 16\], where \[14, 16\] is expected"):
        linear_silu_mul_triton(x, weight[:15], bias)
    with pytest.raises(ValueError, match="scales are given with e4m3 codes, and with nothing else"):
        linear_silu_mul_triton(x.to(FP8), weight.to(FP8))
    with pytest.raises(ValueError, match="x has 8 columns, where a multiple of 16 is expected"):
        linear_silu_mul_triton(x[:, :8].contiguous(), weight[:, :8].contiguous())
