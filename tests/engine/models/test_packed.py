"""Layers with packed weights: the same numbers, and where they are used."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import TRAINED, make_checkpoint
from tests.engine.models.test_decoder import own_logits, some_tokens
from tests.processor import packs_bfloat16
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.formats.quantization import format_of
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.modules import PROJECTIONS, ConvertedLinear
from yardstick_llm.kernels.label_logprobs import label_logprobs
from yardstick_llm.kernels.linear import MKL, ONEDNN, PackedWeight, linear
from yardstick_llm.kernels.soft_cap import soft_cap

CPU = torch.device("cpu")
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}, "qwen3": {"tie_word_embeddings": True}}


@pytest.fixture(scope="module", params=[*TRAINED, "gemma2", "olmo2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **BIASED.get(request.param, {}))


@pytest.fixture(params=[ONEDNN, MKL])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each library in turn, as if it were the faster one."""
    if request.param == MKL and not torch.backends.mkl.is_available():
        pytest.skip("torch has no MKL here")
    monkeypatch.setattr("yardstick_llm.kernels.linear.library", lambda: request.param)
    return request.param


def logits(decoder: Decoder, count: int) -> Tensor:
    return own_logits(decoder, some_tokens(count))


@pytest.mark.slow
def test_the_numbers_are_those_of_plain_weights(model: Path, library: str) -> None:
    decoder, plain = load_model(model, quantize="packed"), load_model(model)
    assert all(isinstance(decoder.layers[2].get_submodule(name), ConvertedLinear) for name in PROJECTIONS)
    assert decoder.layers[2].get_submodule("mlp.down_proj").weight.library == library
    for count in (1, 60):
        torch.testing.assert_close(logits(decoder, count), logits(plain, count), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="packed on x86-64 only")
@packs_bfloat16
def test_bfloat16(model: Path) -> None:
    decoder, plain = (load_model(model, torch.bfloat16, quantize=form) for form in ("packed", None))
    weight = decoder.layers[2].get_submodule("attention.o_proj").weight
    assert isinstance(weight, PackedWeight)
    assert isinstance(decoder.head_operand, PackedWeight)
    assert weight.layout.dtype == torch.bfloat16
    for count in (1, 60):
        found, expected = logits(decoder, count), logits(plain, count)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="packed on x86-64 only")
def test_a_cpu_packs_float32_and_with_amx_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert format_of(None, CPU, torch.float32) == "packed"
    assert format_of("int8", CPU, torch.float32) == "int8"
    for amx, expected in ((True, "packed"), (False, None)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda amx=amx: {"amx_bf16": amx, "avx512_bf16": True})
        assert format_of(None, CPU, torch.bfloat16) == expected
        assert format_of(None, CPU, torch.float32) == "packed"
        assert format_of(None, CPU, torch.float16) is None
    assert format_of(None, torch.device("cuda", 0), torch.float32) is None
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert format_of(None, CPU, torch.float32) is None


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="packed on x86-64 only")
@pytest.mark.parametrize("form", ["packed", "int8"])
def test_the_head_is_packed_beside_the_plain_one(model: Path, form: str, library: str) -> None:
    decoder, plain = load_model(model, quantize=form), load_model(model)
    hidden = torch.randn(7, decoder.config.hidden_size, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[1, 5, 319]]).expand(7, -1)
    with torch.no_grad():
        assert isinstance(decoder.head_operand, PackedWeight)
        assert decoder.head_operand.library == ONEDNN
        assert len(decoder.head_operand) == decoder.config.vocab_size
        torch.testing.assert_close(decoder.logits(hidden), plain.logits(hidden), rtol=1e-4, atol=1e-5)
        head = decoder.token_head
        one = soft_cap(linear(head.input(hidden[:1]), decoder.head_operand), head.cap)
        assert torch.equal(head.logits(hidden[:1]), one), "one row takes the packed one too"
        found, expected = (label_logprobs(hidden, each.head_operand, labels) for each in (decoder, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
