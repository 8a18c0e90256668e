"""Products in 8-bit integers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from yardstick_llm.engine.models.encoder import FUNCTIONS
from yardstick_llm.kernels import int8

pytestmark = pytest.mark.skipif(int8.instructions() is None, reason="the processor does not multiply bytes")

SHAPES = [(512, 1024), (40, 72), (33, 17), (1536, 512)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DTYPES = [torch.float32, torch.bfloat16]


class Layer(NamedTuple):
    """A projection."""

    weight: int8.PackedWeight
    bias: torch.Tensor | None


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 8 bits and back, with a scale for each row, in float64; rows of bfloat16 have scales of bfloat16."""
    scales = (x.float().abs().amax(1, keepdim=True) / 127).to(x.dtype).double()
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_rows_is_within_a_half(dtype: torch.dtype) -> None:
    x = (random(3000, 40) * torch.logspace(-6, 6, 3000)[:, None]).to(dtype)
    codes, scales = int8.quantize_rows(x)
    assert scales.dtype == dtype
    assert codes.min() >= 1
    assert ((codes.double() - 128) - x.double() / scales.double()).abs().max() < 0.501


@pytest.mark.parametrize("gated", [int8.UNGATED, int8.GATE_FIRST, int8.GATE_SECOND])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "biased"), [(DTYPES[0], False), (DTYPES[0], True), (DTYPES[1], True)])
def test_a_feed_forward_layer_is_its_parts(
    dtype: torch.dtype, biased: bool, function: str, gated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yardstick_llm.kernels.row_chunks.THREAD_ELEMENTS", 7 * 3 * 72)  # seven rows at a time
    width = 72 if gated == int8.UNGATED else 144
    x, into, back = random(50, 40).to(dtype), random(width, 40, seed=1) / 6, random(40, 72, seed=2) / 8
    biases = [random(count, seed=3).to(dtype) if biased else None for count in (width, 40)]
    first, down = Layer(int8.pack(into), biases[0]), Layer(int8.pack(back), biases[1])
    found = int8.int8_activated(x, first, down, function, gated, 72)
    assert found.dtype == dtype
    product = int8.int8_linear(x.float(), first.weight, None if biases[0] is None else biases[0].float())
    halves = product if gated == int8.UNGATED else product[:, :72] if gated == int8.GATE_FIRST else product[:, 72:]
    inner = FUNCTIONS[function](halves)
    if gated != int8.UNGATED:
        inner = inner * (product[:, 72:] if gated == int8.GATE_FIRST else product[:, :72])
    expected = int8.int8_linear(inner, down.weight, None if biases[1] is None else biases[1].float())
    # In float32 a code may round to the other side; in bfloat16 the first product and the result are rounded too.
    assert (found.float() - expected).norm() < (0.005 if dtype == torch.float32 else 0.02) * expected.norm()
    whole = [int8.int8_activated(x[start:end], first, down, function, gated, 72) for start, end in ((0, 1), (1, 9), (9, 50))]
    assert torch.equal(torch.cat(whole), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "out"), SHAPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(size: int, out: int, dtype: torch.dtype) -> None:
    x, weight = random(777, size).to(dtype), int8.pack(random(out, size, seed=1))
    x[::3] *= 1000
    whole = int8.int8_linear(x, weight)
    for start, end in ((0, 1), (5, 7), (100, 133), (0, 500), (3, 3)):
        assert torch.equal(int8.int8_linear(x[start:end], weight), whole[start:end])
    mixed = torch.randperm(777, generator=torch.Generator().manual_seed(3))
    assert torch.equal(int8.int8_linear(x[mixed], weight), whole[mixed])


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
