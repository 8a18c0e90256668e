"""Products in 8-bit integers."""

from __future__ import annotations

import pytest
import torch

from kernels import int8

pytestmark = pytest.mark.skipif(int8.instructions() is None, reason="the processor does not multiply bytes")

SHAPES = [(512, 1024), (40, 72), (33, 17), (1536, 512)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 8 bits and back, with a scale for each row, in float64."""
    scales = x.double().abs().amax(1, keepdim=True) / 127
    return (x.double() / scales).round() * scales


@pytest.mark.parametrize(("size", "out"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_it_multiplies_rounded_operands(size: int, out: int, biased: bool) -> None:
    x, weight, bias = random(50, size), random(out, size, seed=1), random(out, seed=2) if biased else None
    found = int8.int8_linear(x, int8.pack(weight), bias)
    expected = rounded(x) @ rounded(weight).t() + (0 if bias is None else bias)
    # A number half-way between two codes may become either; each such step is 1/127 of the row's peak.
    assert (found - expected).norm() < 0.002 * expected.norm()
    plain = torch.nn.functional.linear(x, weight, bias)
    assert 0.001 < (found - plain).norm() / plain.norm() < 0.03


@pytest.mark.parametrize(("size", "out"), SHAPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(size: int, out: int) -> None:
    x, weight = random(777, size), int8.pack(random(out, size, seed=1))
    x[::3] *= 1000
    whole = int8.int8_linear(x, weight)
    for start, end in ((0, 1), (5, 7), (100, 133), (0, 500), (3, 3)):
        assert torch.equal(int8.int8_linear(x[start:end], weight), whole[start:end])
    mixed = torch.randperm(777, generator=torch.Generator().manual_seed(3))
    assert torch.equal(int8.int8_linear(x[mixed], weight), whole[mixed])


def test_sums_of_the_largest_codes_do_not_saturate() -> None:
    found = int8.int8_linear(torch.ones(20, 4096), int8.pack(torch.ones(8, 4096)))
    torch.testing.assert_close(found, torch.full((20, 8), 4096.0), rtol=1e-5, atol=0)


def test_rows_of_zeros_and_of_large_and_tiny_numbers() -> None:
    codes, scales = int8.quantize_rows(torch.tensor([[0.0, 0.0], [1e30, -1e30], [1e-6, -2e-6], [-3.0, 3.0]]))
    assert codes.tolist() == [[128, 128], [255, 1], [192, 1], [1, 255]]
    torch.testing.assert_close(scales.squeeze(1), torch.tensor([1e-10, 1e30, 2e-6, 3.0]) / 127)


def test_what_is_not_a_number_stays_visible() -> None:
    x = random(3, 40)
    x[1, 7] = float("nan")
    found = int8.int8_linear(x, int8.pack(random(8, 40, seed=1)))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
