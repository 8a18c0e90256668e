"""Scales of keys and values in FP8: bounds from the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.decoder import Decoder, DecoderLayer, FusedAttend, Heads
from engine.models.files import ModelError
from engine.models.formats.quantization import arithmetic_of, check_kv_dtype, kv_bounds, kv_scales
from engine.models.loader import fingerprint, load_model
from kernels.int8 import instructions
from tests.checkpoints import make_checkpoint

GPU = torch.device("cuda", 0)
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}


def peaks(decoder: Decoder, inputs: Tensor) -> Tensor:
    """[layers, 2, kv_heads]: largest key and value that any of ``inputs``, [tokens, hidden], gives in each layer."""
    found = []

    def attend(layer: int, heads: Heads) -> Tensor:
        q, k, v = heads.rotated()
        found.append(torch.stack([k.abs().amax((0, 2)), v.abs().amax((0, 2))]))
        return q

    (cos, sin), *_ = decoder._rotations(torch.arange(len(inputs)).unsqueeze(1))
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        layer.attention(layer.input_norm(inputs), cos, sin, FusedAttend(attend))
    return torch.stack(found)


def directions(decoder: Decoder) -> Tensor:
    """Inputs that are the worst for one element each of the first layer's keys and values, among random ones."""
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    weight = layer.attention.qkv_proj.get_parameter("weight")
    return torch.cat([weight * layer.input_norm.weight, torch.randn(50, weight.shape[1])])


@pytest.mark.parametrize(
    ("family", "overrides"), [("qwen2", {}), ("qwen3", {}), ("llama", {}), ("qwen3", YARN), ("phi4_mini", {})], ids=str
)
@torch.no_grad()
def test_no_key_or_value_exceeds_its_bound(tmp_path: Path, family: str, overrides: dict[str, object]) -> None:
    decoder = load_model(make_checkpoint(tmp_path, family, **overrides))
    for name, parameter in decoder.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.copy_(3 * torch.randn_like(parameter))
    bounds = torch.stack([kv_bounds(layer, decoder.config) for layer in decoder.layers if isinstance(layer, DecoderLayer)])
    found = peaks(decoder, directions(decoder))
    assert (found <= bounds * 1.0001).all()
    assert (found[0] > 0.4 * bounds[0]).any(), "the bound is nearly reached by the worst input"
    scales = kv_scales(decoder)
    assert (bounds < 448 * scales).all()
    assert (bounds * 4 > 448 * scales).all()
    assert torch.equal(scales, 2 ** scales.log2().round())


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
def test_quantised_models_have_the_same_scales(tmp_path: Path, quantize: str) -> None:
    if quantize == "int8" and instructions() is None:
        pytest.skip("no int8")
    model = make_checkpoint(tmp_path, "qwen3")
    assert torch.equal(kv_scales(load_model(model, quantize=quantize)), kv_scales(load_model(model)))


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kv_dtype(torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="--kv-dtype fp8 needs a range that float16 lacks; use --dtype bfloat16"):
        check_kv_dtype(torch.device("cpu"), torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    check_kv_dtype(GPU, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ModelError, match=r"--kv-dtype fp8 needs .* 8\.9 or later, and this one has 8\.0; leave --kv-dtype out"):
        check_kv_dtype(GPU, torch.bfloat16)


def test_the_fingerprint_and_the_arithmetic_name_it(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3")
    plain = fingerprint(model, torch.float32)
    assert fingerprint(model, torch.float32, kv_dtype="auto") == plain
    assert len({plain, *(fingerprint(model, torch.float32, each, kv_dtype="fp8") for each in (None, "fp8"))}) == 3
    assert arithmetic_of(torch.bfloat16, "fp8", "fp8") == "bfloat16, matrix products in fp8, keys and values in fp8"
    assert arithmetic_of(torch.float32, None, "fp8") == "float32, keys and values in fp8"
