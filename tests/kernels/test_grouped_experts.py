"""Products with the experts of each row: the kernel and the reference against row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.grouped_experts import (
    FEW_PAIRS,
    ROW_BLOCKS,
    block_pairs,
    grouped_linear,
    grouped_linear_reference,
    grouped_linear_triton,
    grouped_scaled_linear,
    grouped_scaled_linear_reference,
    grouped_scaled_linear_triton,
    route,
)
from yardstick_llm.kernels.quantize import quantize_rows_reference, supported

SHAPES = [(1, 4, 2, 32, 16), (9, 8, 3, 70, 50), (270, 3, 2, 64, 40), (5, 6, 1, 33, 130), (0, 4, 2, 16, 16)]
"""(rows, experts, chosen, in, out): few pairs, many of each expert, sizes that fill no block, and nothing at all."""


def inputs(
    rows: int, count: int, chosen: int, size: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, size, generator=generator), torch.randn(count, columns, size, generator=generator)
    experts = torch.rand(rows, count, generator=generator).topk(chosen, -1).indices
    return x.to(device, dtype), weight.to(device, dtype), experts.to(device)


def row_by_row(x: Tensor, weight: Tensor, experts: Tensor, *, by_pair: bool = False) -> Tensor:
    pairs = [(row, expert) for row, chosen in enumerate(experts.tolist()) for expert in chosen]
    products = [weight[expert].double() @ x[pair if by_pair else row].double() for pair, (row, expert) in enumerate(pairs)]
    return torch.stack(products).to(x.dtype) if products else x.new_empty(0, weight.shape[1])


@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int, int, int], by_pair: bool, device: torch.device) -> None:
    x, weight, experts = inputs(*shape, device)
    if by_pair:
        x = torch.randn(experts.numel(), shape[3], device=device)
    expected = row_by_row(x, weight, experts, by_pair=by_pair)
    for operation in (grouped_linear, grouped_linear_reference, grouped_linear_triton):
        torch.testing.assert_close(operation(x, weight, experts, by_pair=by_pair), expected, atol=2e-5, rtol=1e-5)


def test_half_precision(device: torch.device) -> None:
    x, weight, experts = inputs(40, 4, 2, 64, 48, device, torch.float16)
    torch.testing.assert_close(grouped_linear_triton(x, weight, experts), row_by_row(x, weight, experts), atol=0.02, rtol=5e-3)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize_rows_reference(x.cpu())
    return codes.to(x.device), scales.to(x.device)


@pytest.mark.slow
@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_in_fp8(shape: tuple[int, int, int, int, int], by_pair: bool, device: torch.device) -> None:
    """Equal to the products of what codes and scales stand for: nothing but the sum is rounded."""
    if device.type == "cuda" and not supported(device):
        pytest.skip("no products of FP8")
    x, weight, experts = inputs(*shape, device)
    if by_pair:
        x = torch.randn(experts.numel(), shape[3], device=device)
    operands = quantized(x * 0.1), quantized(weight * torch.rand(*weight.shape[:2], 1, device=device))
    expected = row_by_row(*(codes.float() * scales for codes, scales in operands), experts, by_pair=by_pair)
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if device.type == "cuda" else {"atol": 2e-5, "rtol": 1e-5}
    for operation in (grouped_scaled_linear, grouped_scaled_linear_reference, grouped_scaled_linear_triton):
        torch.testing.assert_close(operation(*operands, experts, torch.float32, by_pair=by_pair), expected, **tolerance)
        assert operation(*operands, experts, torch.bfloat16, by_pair=by_pair).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [9, 300])
def test_experts_elsewhere_are_left_out(rows: int, device: torch.device) -> None:
    """Rows of the others are as if these were not there; their own are not defined."""
    x, weight, experts = inputs(rows, 8, 2, 32, 48, device)
    here = (experts >= 2) & (experts < 5)
    given = torch.where(here, experts - 2, 3)
    expected = row_by_row(x, weight, experts)[here.flatten()]
    operands = quantized(x), quantized(weight[2:5])
    exact = row_by_row(*(codes.float() * scales for codes, scales in (operands[0], quantized(weight))), experts)[here.flatten()]
    for operation in (grouped_linear, grouped_linear_reference, grouped_linear_triton):
        found = operation(x, weight[2:5].contiguous(), given)
        torch.testing.assert_close(found[here.flatten()], expected, atol=2e-5, rtol=1e-5)
    if device.type == "cpu" or supported(device):
        for operation in (grouped_scaled_linear, grouped_scaled_linear_reference, grouped_scaled_linear_triton):
            found = operation(*operands, given, torch.float32)
            torch.testing.assert_close(found[here.flatten()], exact, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("rows", "count"), [(1, 3), (7, 3), (300, 5), (40, 128), (700, 4)])
def test_blocks_have_each_pair_once_and_one_expert(rows: int, count: int, device: torch.device) -> None:
    x, weight, experts = inputs(rows, count, 2, 4, 4, device)
    blocks = block_pairs(experts, count)
    shared = grouped_linear_triton(x, weight, experts, blocks)
    assert torch.equal(shared, grouped_linear_triton(x, weight, experts)), "the blocks may be made once for several products"
    places = blocks.places.view(-1, blocks.size).tolist()
    pairs = 2 * rows
    assert sorted(pair for block in places for pair in block if pair < pairs) == list(range(pairs))
    flat = experts.flatten().tolist()
    for block, expert in zip(places, blocks.experts.tolist(), strict=True):
        assert {flat[pair] for pair in block if pair < pairs} <= {expert}
        assert set(block) != {pairs} or expert == count, "blocks of padding alone are of no expert"
    assert blocks.size == ROW_BLOCKS[pairs > FEW_PAIRS]


def test_routes() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.5]])
    probabilities = logits.softmax(-1)
    experts, weights = route(logits, 2, renormalise=False)
    assert experts.tolist() == [[1, 2], [2, 0]]
    torch.testing.assert_close(weights, probabilities.gather(1, experts))
    torch.testing.assert_close(route(logits, 2, renormalise=True)[1].sum(-1), torch.ones(2))
    assert route(logits.bfloat16(), 1, renormalise=False)[1].dtype == torch.float32
