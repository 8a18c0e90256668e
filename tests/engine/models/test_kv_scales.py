"""Keys and values in FP8: their scales, and what an engine computes from them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.engine.parity import make_loop, some_tokens
from tests.engine.test_item_scores import answer, message
from tests.engine.test_loop import run
from tests.processor import multiplies_bytes
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.decoder import Decoder, DecoderLayer, FusedAttend, Heads
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.quantization import arithmetic_of, check_kv_dtype, kv_bounds, kv_scales
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.runner import machine as capacity
from yardstick_llm.engine.runner.machine import default_slots
from yardstick_llm.kernels.quantize import FP8

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


@pytest.mark.parametrize("quantize", ["fp8", pytest.param("int8", marks=multiplies_bytes)])
def test_quantised_models_have_the_same_scales(tmp_path: Path, quantize: str) -> None:
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


def test_the_arithmetic_names_it() -> None:
    assert arithmetic_of(torch.bfloat16, "fp8", "fp8") == "bfloat16, matrix products in fp8, keys and values in fp8"
    assert arithmetic_of(torch.float32, None, "fp8") == "float32, keys and values in fp8"


LABELS = wire.Labels([5, 17, 300])


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), str(request.param), hidden_size=128, intermediate_size=128)


@pytest.mark.slow
def test_scores_are_closer_to_those_of_the_models_dtype_than_with_products_in_fp8(checkpoint: Path) -> None:
    rng = random.Random(1)
    prefix, items = some_tokens(rng, 80, 80), [some_tokens(rng, 5, 60) for _ in range(8)]
    rows = {}
    formats: dict[str, dict[str, str]] = {"plain": {}, "kept": {"kv_dtype": "fp8"}, "products": {"quantize": "fp8"}}
    for name, settings in formats.items():
        loop = make_loop(checkpoint, max_batched_tokens=70, **settings)
        rows[name] = torch.tensor(answer(run(loop, wire.Score("s", prefix, items, LABELS))).rows)
        written = run(loop, wire.Generate("g", prefix, wire.Sampling(max_tokens=8, temperature=0, ignore_eos=True)))
        assert sum(len(reply.tokens) for reply in written if isinstance(reply, wire.Delta)) == 8
        assert ("keys and values in fp8" in loop.info.arithmetic) == (name == "kept")
    kept, products = ((rows[name] - rows["plain"]).abs() for name in ("kept", "products"))
    assert 1e-3 < kept.mean() < 0.5 * products.mean()
    assert kept.max() < 0.5 * products.max()


def test_cached_keys_and_values_are_those_of_the_first_request(checkpoint: Path) -> None:
    """A token is quantised once: later requests read the same codes, and equal steps give equal bits."""
    rng = random.Random(2)
    items, query = [some_tokens(rng, 30, 30) for _ in range(6)], some_tokens(rng, 5, 5)
    loop = make_loop(checkpoint, kv_dtype="fp8")
    kv = loop._runner._attention.kv
    assert kv.keys.dtype == kv.values.dtype == FP8
    cold = answer(run(loop, message("cold", items, query)))
    slots = torch.tensor([slot for node in loop._scheduler.cache.nodes() for slot in node.slots])
    before = kv.keys.view(torch.uint8)[:, slots].clone(), kv.values.view(torch.uint8)[:, slots].clone()
    assert before[0].any(), "keys were written"
    warm = answer(run(loop, message("warm", items, query)))
    assert (warm.cached_items, warm.cached_tokens) == (6, 180)
    assert loop.info.slot_bytes == (kv.keys.nbytes + kv.values.nbytes) // kv.keys.shape[1]
    assert loop.stats.item_bytes == 180 * loop.info.slot_bytes
    again = answer(run(loop, message("again", items, query)))
    assert torch.equal(kv.keys.view(torch.uint8)[:, slots], before[0])
    assert torch.equal(kv.values.view(torch.uint8)[:, slots], before[1])
    assert warm.rows == again.rows
    torch.testing.assert_close(torch.tensor(warm.rows), torch.tensor(cold.rows), rtol=0, atol=1e-5)


def test_a_slot_takes_one_byte_for_each_number(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: float(32 << 30))
    decoder = load_model(checkpoint)
    kept = [FP8], [torch.float32]
    few, many = (default_slots([decoder], dtypes, 1024) for dtypes in (kept[1], kept[0]))
    assert few > 1024
    assert many == pytest.approx(4 * few, rel=0.01)
