"""The plain PyTorch references against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.processor import packs_bfloat16
from yardstick_llm import kernels
from yardstick_llm.kernels.label_logprobs import label_logprobs
from yardstick_llm.kernels.linear import MKL, ONEDNN, linear, pack, packed_gelu, packed_linear
from yardstick_llm.kernels.rms_norm import add_rms_norm, rms_norm
from yardstick_llm.kernels.rope import rope
from yardstick_llm.kernels.silu_mul import silu_mul

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LIBRARIES = [ONEDNN, pytest.param(MKL, marks=pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL"))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 3, 32, dtype=dtype), torch.randn(32, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


def test_a_row_is_normalised_alike_beside_any_others() -> None:
    heads, rows, weight = torch.randn(500, 12, 64), torch.randn(500, 512), torch.randn(512)
    for start, end in ((0, 1), (7, 9), (100, 400)):
        whole = rms_norm(heads[:, :8], weight[:64], 1e-6)
        assert torch.equal(rms_norm(heads[start:end, :8], weight[:64], 1e-6), whole[start:end])
        assert torch.equal(rms_norm(rows[start:end], weight, 1e-6), rms_norm(rows, weight, 1e-6)[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 32, dtype=dtype), torch.randn(5, 32, dtype=dtype), torch.randn(32, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_a_rotation_of_pairs(dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, 16, dtype=dtype)
    angles = torch.randn(6, 8)
    pairs = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(
        torch.ones(6, 1, 8).double(), angles[:, None].double()
    )
    found = rope(x, angles.cos(), angles.sin())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), torch.cat((pairs.real, pairs.imag), -1), atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rows: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 48, dtype=dtype), torch.randn(20, 48, dtype=dtype) / 7
    bias = torch.randn(20, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = linear(x, weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", [(48, 20), (33, 1), (300, 700)])
@pytest.mark.parametrize("biased", [True, False])
def test_packed_linear(shape: tuple[int, int], biased: bool, name: str) -> None:
    """One packed weight multiplies any number of rows, whatever number it was packed for."""
    size, out = shape
    weight, bias = torch.randn(out, size) / size**0.5, torch.randn(out) if biased else None
    packed = pack(weight, name)
    for rows in (0, 1, 2, 7, 33, 255, 257, 1000):
        x = torch.randn(rows, size)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(packed_linear(x, packed, bias).double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(linear(x, packed, bias).double(), expected, atol=1e-5, rtol=1e-5)
        for tanh in (False, True):
            gelu = torch.nn.functional.gelu(expected, approximate="tanh" if tanh else "none")
            torch.testing.assert_close(packed_gelu(x, packed, bias, tanh=tanh).double(), gelu, atol=1e-5, rtol=1e-5)


@packs_bfloat16
@pytest.mark.parametrize("rows", [0, 1, 33, 500])
@pytest.mark.parametrize("biased", [True, False])
def test_packed_linear_in_bfloat16(rows: int, biased: bool) -> None:
    x, weight = torch.randn(rows, 48).bfloat16(), (torch.randn(20, 48) / 7).bfloat16()
    bias = torch.randn(20).bfloat16() if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = packed_linear(x, pack(weight), bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("reduce", [torch.sum, lambda y: y.square().mean()], ids=["expanded gradient", "dense gradient"])
def test_linear_gradients(biased: bool, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((33, 48), (20, 48), (20,))[: 3 if biased else 2]]
    found = torch.autograd.grad(reduce(linear(*inputs)), inputs)
    expected = torch.autograd.grad(reduce(torch.nn.functional.linear(*inputs)), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_gradients() -> None:
    """Training goes through all of them."""
    gate_up, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (8,)))
    heads = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 3, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(silu_mul, gate_up)
    assert torch.autograd.gradcheck(lambda x, w: add_rms_norm(x, x * 2, w, 1e-3), (gate_up, weight))
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), heads)


@pytest.mark.parametrize("chunk", [1, 250, 1 << 24])
def test_label_logprobs(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.kernels.label_logprobs.CHUNK_ELEMENTS", chunk)
    hidden, head, labels = torch.randn(9, 16), torch.randn(100, 16), torch.randint(0, 100, (9, 3))
    expected = (hidden.double() @ head.double().T).log_softmax(-1).gather(1, labels)
    torch.testing.assert_close(label_logprobs(hidden, head, labels).double(), expected, atol=1e-5, rtol=0)


def test_package_stays_empty() -> None:
    """transformers probes for a package of this name; what it finds must do nothing."""
    assert kernels.__file__ is not None
    assert Path(kernels.__file__).read_text() == ""
