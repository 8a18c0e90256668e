"""Layers in int8: what they compute, what stays as it was, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoints import TRAINED, make_checkpoint
from tests.engine.models.test_decoder import own_logits, some_tokens
from tests.processor import bfloat16, multiplies_bytes
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.decoder import MLP, Decoder, DecoderLayer
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats import int8
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.modules import GroupedLinear, Linear
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels.int8 import Panels, instructions, pack, quantize_rows

BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}, "qwen3": {"tie_word_embeddings": True}}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*TRAINED, "gemma2", "olmo2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **BIASED.get(request.param, {}))


def logits(decoder: Decoder, count: int = 60) -> Tensor:
    return own_logits(decoder, some_tokens(count))


def rounded(x: Tensor) -> Tensor:
    """To 8 bits and back."""
    like = pack(torch.ones(1, x.shape[1]))
    codes, scales, _ = (part[: len(x)] for part in quantize_rows(x, like))
    return (codes.view(torch.int8).float() if isinstance(like, Panels) else codes.float() - 128) * scales


@multiplies_bytes
def test_every_projection_multiplies_rounded_operands(model: Path) -> None:
    """Each is given the same input as its own: through several layers, a code that rounds to the other side changes many others."""
    decoder, plain = load_model(model, quantize="int8"), load_model(model)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.mlp, MLP)
        layer.mlp.compute = None
    checked = 0

    def check(name: str, module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        nonlocal checked
        like = plain.get_submodule(name)
        assert isinstance(module, int8.Int8Linear)
        assert isinstance(like, Linear)
        expected = nn.functional.linear(rounded(arguments[0]), rounded(like.weight), like.bias)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        checked += 1

    for name, module in decoder.named_modules():
        if isinstance(module, int8.Int8Linear):
            module.register_forward_hook(partial(check, name))
    with torch.no_grad():
        found, exact = logits(decoder), logits(plain)
        assert checked == 3 * 4
        assert 0.001 < (found - exact).norm() / exact.norm() < 0.1


@multiplies_bytes
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_experts_multiply_rounded_operands(tmp_path: Path, family: str) -> None:
    """And the shared expert of Qwen2-MoE."""
    directory = make_checkpoint(tmp_path, family)
    decoder, plain = load_model(directory, quantize="int8"), load_model(directory)
    checked = 0

    def check(name: str, module: nn.Module, given: tuple[Tensor, Tensor, None], named: dict[str, bool], output: Tensor) -> None:
        nonlocal checked
        (x, experts, _), by_pair, like = given, named.get("by_pair", False), plain.get_submodule(name)
        assert isinstance(like, GroupedLinear)
        rows = rounded(x if by_pair else x.repeat_interleave(experts.shape[1], 0))
        matrices = torch.stack([rounded(matrix) for matrix in like.weight])[experts.flatten()]
        expected = (matrices @ rows[..., None])[..., 0]
        assert (output - expected).norm() / expected.norm() < 1e-3  # a few codes are rounded to the other side
        checked += 1

    for name, module in decoder.named_modules():
        assert not isinstance(module, GroupedLinear)
        if isinstance(module, int8.Int8GroupedLinear):
            module.register_forward_hook(partial(check, name), with_kwargs=True)
    with torch.no_grad():
        found, exact = logits(decoder), logits(plain)
    assert checked == 2 * (3 if family == "mixtral" else 2)
    assert 0.001 < (found - exact).norm() / exact.norm() < 0.2


@multiplies_bytes
@bfloat16
def test_bfloat16_around_the_products_adds_little_to_the_error_of_int8(model: Path) -> None:
    exact = logits(load_model(model))
    found, in_float32 = (load_model(model, dtype, "int8") for dtype in (torch.bfloat16, torch.float32))
    assert found.embed.weight.dtype == logits(found).dtype == torch.bfloat16
    errors = [(logits(decoder).float() - exact).norm() / exact.norm() for decoder in (found, in_float32)]
    assert errors[0] < errors[1] + 0.03  # bfloat16 alone: 0.02


def test_what_cannot_compute_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="int8 computes on a CPU, and the model is on a GPU; use --quantize fp8 there"):
        int8.check_device(torch.device("cuda", 0), torch.bfloat16)
    with pytest.raises(ModelError, match=r"int8 needs float32 or bfloat16 .* --dtype is float16; leave one of the two out"):
        int8.check_device(CPU, torch.float16)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_vnni": False})
    with pytest.raises(ModelError, match=r"int8 needs a processor with one of amx_int8, avx512_vnni.* leave --quantize out"):
        int8.check_device(CPU, torch.float32)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True, "amx_int8": True})
    int8.check_device(CPU, torch.float32)
    assert instructions() == "amx_int8"
    with pytest.raises(ModelError, match=r"int8 with --dtype bfloat16 needs .*one of amx_bf16, avx512_bf16.* use --dtype float32"):
        int8.check_device(CPU, torch.bfloat16)
    for found in ("amx_bf16", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: {"avx512_vnni": True, found: True})
        int8.check_device(CPU, torch.bfloat16)


def test_sums_that_could_overflow_are_refused(qwen3: Path) -> None:
    config = dataclasses.replace(load_config(qwen3), num_layers=1, intermediate_size=65_537)
    with torch.device("meta"):
        decoder = Decoder(config)
    with pytest.raises(ModelError, match="at most 65,536 products, and the model's down_proj has 65,537 columns"):
        int8.check_shapes(decoder)


@pytest.mark.slow
@multiplies_bytes
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=bfloat16)])
def test_the_engine_serves_it_and_a_score_does_not_depend_on_the_other_items(qwen3: Path, dtype: str) -> None:
    prefix, items, labels = list(range(3, 80)), [[7, 8, 9], [10], list(range(20, 60)), [5, 6, 7, 8]], [1, 5, 2]
    given = {"model": str(qwen3), "name": "t", "max_total_tokens": 2048, "quantize": "int8", "dtype": dtype}

    def rows(budget: int, *chosen: list[int]) -> list[list[float]]:
        loop = build_loop(EngineSettings(**given, max_batched_tokens=budget))
        assert loop.info.arithmetic.startswith(f"{dtype}, matrix products in int8")
        loop.submit(wire.Score("s", prefix, list(chosen), wire.Labels(labels)))
        replies: list[wire.Reply] = []
        while not loop.idle:
            replies += loop.step()
        assert isinstance(replies[-1], wire.Scored), replies
        return replies[-1].rows

    # Attention rounds to the dtype, in another order where items lie otherwise, and such a difference can change a code behind it.
    tolerance = 1e-6 if dtype == "float32" else 0.1
    together = rows(2048, *items)
    for budget in (48, 2048):
        alone = [rows(budget, item)[0] for item in items]
        torch.testing.assert_close(torch.tensor(alone), torch.tensor(together), rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.tensor(rows(96, *items[::-1])[::-1]), torch.tensor(together), rtol=0, atol=tolerance)
