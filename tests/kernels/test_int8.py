"""Products in 8-bit integers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.processor import multiplies_bytes
from yardstick_llm.engine.models.encoder import FUNCTIONS
from yardstick_llm.kernels import int8
from yardstick_llm.kernels.runtime import loops
from yardstick_llm.kernels.weight_only import dense

pytestmark = multiplies_bytes

SHAPES = [(512, 1024), (40, 72), (33, 17), (1536, 512)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=["loops", "oneDNN"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loops multiply weights with one scale for each output, as without AMX, or oneDNN, as with it."""
    monkeypatch.setattr(int8, "PANEL_INSTRUCTIONS", int8.INSTRUCTIONS if request.param == "loops" else ())


class Layer(NamedTuple):
    """A projection."""

    weight: int8.Weight
    bias: torch.Tensor | None


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 8 bits and back, with a scale for each row, in float64; rows of bfloat16 have scales of bfloat16."""
    scales = (x.float().abs().amax(1, keepdim=True) / 127).to(x.dtype).double()
    return (x.double() / scales).round() * scales


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes whose zero is 0, and scales."""
    like = int8.pack(torch.ones(1, x.shape[1]))
    codes, scales, _ = (part[: len(x)] for part in int8.quantize_rows(x, like))
    return (codes.view(torch.int8).int() if isinstance(like, int8.Panels) else codes.int() - 128), scales


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
    codes, scales = quantized(x)
    assert codes.abs().max() <= 127
    assert (codes - x.double() / scales.double()).abs().max() < 0.501


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
    codes, scales = quantized(torch.tensor([[0.0, 0.0] * 2, [1e30, -1e30] * 2, [1e-6, -2e-6] * 2, [-3.0, 3.0] * 2]))
    assert codes[:, :2].tolist() == [[0, 0], [127, -127], [64, -127], [-127, 127]]
    torch.testing.assert_close(scales.squeeze(1), torch.tensor([1e-10, 1e30, 2e-6, 3.0]) / 127)


def test_what_is_not_a_number_stays_visible() -> None:
    x = random(3, 40)
    x[1, 7] = float("nan")
    found = int8.int8_linear(x, int8.pack(random(8, 40, seed=1)))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


FORMS = [
    (1, 70, 64, 32, 4, "one zero"),
    (5, 64, 128, 32, 4, "offsets"),
    (8, 96, 128, 64, 4, "zeros"),
    (13, 33, 96, 96, 8, "signed"),
    (300, 160, 256, 16, 8, "offsets"),
    (2, 64, 64, 32, 8, "signed"),
    (7, 40, 128, 32, 8, "signed with offsets"),
]


@pytest.mark.parametrize(("rows", "out", "size", "group", "bits", "form"), FORMS)
def test_codes_with_scales_of_groups(rows: int, out: int, size: int, group: int, bits: int, form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (out, size), dtype=torch.uint8, generator=generator)
    codes = codes.view(torch.int8) if "signed" in form else codes
    scales = random(out, size // group, seed=1) / 100
    forms = {"one zero": torch.full_like(scales, 8), "zeros": (random(*scales.shape).abs() * 4).round()}
    zeros = forms.get(form)
    offsets = random(*scales.shape, seed=2) / 10 if "offsets" in form else None
    weight = int8.pack_panels(codes, scales, zeros, offsets, bits)
    assert weight.codes.nbytes == -(-out // 32) * 32 * size * bits // 8 or loops().LANES < 16
    x, bias = random(rows, size, seed=3), random(out, seed=4)
    found = int8.int8_linear(x, weight, bias)
    plain, parts = dense(codes, scales, zeros, offsets), int8.quantize_rows(x, weight)
    given = parts.codes[:rows].view(torch.int8).double().view(rows, -1, group) * parts.scales[:rows, :, None]
    exact = given.view(rows, size) @ plain.double().t() + bias
    assert (found - exact).norm() < 1e-3 * exact.norm()  # scales and offsets are rounded to float16
    assert (found - (x @ plain.t() + bias)).norm() < 0.02 * exact.norm()
    assert torch.equal(torch.cat([int8.int8_linear(row, weight, bias) for row in x[:, None]]), found)
    narrow = x.bfloat16()
    assert torch.equal(int8.int8_linear(narrow, weight, bias), int8.int8_linear(narrow.float(), weight, bias).bfloat16())
