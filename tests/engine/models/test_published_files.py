"""Quantised checkpoints: each format loads as the dense weights that its codes stand for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.models.causal import causal_of
from tests.engine.models.published_files import FORMATS, QUANTISED, write_quantised
from tests.processor import bfloat16, multiplies_bytes
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats import stored
from yardstick_llm.engine.models.formats.fp8 import QuantizedGroupedLinear, QuantizedLinear, QuantizingLinear
from yardstick_llm.engine.models.formats.int8 import Int8GroupedLinear, Int8Linear
from yardstick_llm.engine.models.formats.packed import PackedLinear
from yardstick_llm.engine.models.formats.stored import (
    BlockScaledLinear,
    WeightOnlyGroupedLinear,
    WeightOnlyLinear,
)
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.modules import PROJECTIONS, GroupedLinear, Linear
from yardstick_llm.engine.runner.distributed.shard import ShardedDecoder, load_part
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels.int8 import Panels, instructions
from yardstick_llm.kernels.quantize import quantize_rows
from yardstick_llm.kernels.weight_only import dense as dense_of
from yardstick_llm.kernels.weight_only import unpack_halves


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


QUICK = ("w4a16 asymmetric", "w8a8", "fp8 channel", "nvfp4", "fp8 block", "gptq asymmetric ordered", "awq", "nf4 nested")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS])
def test_dequantised_weights_are_those_that_the_codes_stand_for(llama: Path, tmp_path: Path, name: str) -> None:
    quantised, dense = write_quantised(llama, tmp_path, name)
    found, expected = (load_model(directory).checkpoint_views() for directory in (quantised, dense))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6 if name == "bitsandbytes int8" else 0, atol=0)


@pytest.mark.parametrize(
    ("family", "name", "overrides"),
    [
        ("phi3", "w4a16", {}),
        ("qwen3", "gptq", {"tie_word_embeddings": True}),
        ("qwen2", "awq", {}),
        ("mixtral", "fp8 block", {"intermediate_size": 64}),
        ("qwen2_moe", "gptq asymmetric ordered", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}),
        ("gemma2", "nf4", {}),
    ],
)
def test_families(tmp_path: Path, family: str, name: str, overrides: dict[str, Any]) -> None:
    """Fused projections, biases, experts and heads that are quantised."""
    source = make_checkpoint(tmp_path / "source", family, **overrides)
    quantised, dense = write_quantised(source, tmp_path, name, QUANTISED.pattern + r"|lm_head\.weight")
    found, expected = (load_model(directory).checkpoint_views() for directory in (quantised, dense))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def broken(directory: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Path:
    """The checkpoint after a change of its tensors or its ``quantization_config``."""
    tensors, raw = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    change(tensors, raw["quantization_config"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("family", "overrides"), [("qwen2", {}), ("mixtral", {"intermediate_size": 64, "num_local_experts": 2, "num_hidden_layers": 2})]
)
def test_biases_of_gptq_that_are_zero_are_left_out(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """As AutoGPTQ writes them beside each projection, which Qwen2 has biases of its own for some of."""
    source = make_checkpoint(tmp_path / "source", family, **overrides)
    quantised, dense = write_quantised(source, tmp_path, "gptq")

    def add(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            tensors.setdefault(name.replace("qweight", "bias"), torch.zeros(tensors[name].shape[1]).half())

    broken(quantised, add)
    found, expected = (load_model(directory).checkpoint_views() for directory in (quantised, dense))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    coded = load_model(quantised, quantize=stored.NAME)
    assert (logits(coded, 8) - logits(load_model(dense), 8)).abs().max() < 1e-4
    part = "mlp.down_proj" if family == "qwen2" else "block_sparse_moe.experts.1.w2"
    name = f"model.layers.0.{part}.bias"
    for value in (1e-7, float("nan")):
        broken(quantised, lambda tensors, config, value=value: tensors[name].__setitem__(5, value))
        with pytest.raises(ModelError, match=f"Tensor {name} in model.safetensors is not all zeros, and the model has no place"):
            load_model(quantised)


@pytest.mark.parametrize("name", ["gptq", "w4a16"])
def test_other_biases_are_refused_though_they_are_zero(llama: Path, tmp_path: Path, name: str) -> None:
    """Beside a dense weight, and in other formats."""
    quantised, _ = write_quantised(llama, tmp_path, name, both=False)
    place = "model.layers.1.self_attn.k_proj.bias" if name == "gptq" else Q + "bias"
    broken(quantised, lambda tensors, config: tensors.update({place: torch.zeros(32)}))
    with pytest.raises(ModelError, match=f"The weights have tensor {place}, which the model has no place for"):
        load_model(quantised)


def test_zero_points_of_keys_and_values_are_zero(llama: Path, tmp_path: Path) -> None:
    quantised, dense = write_quantised(llama, tmp_path, "fp8 channel")
    names = [f"model.layers.{layer}.self_attn.{which}_zero_point" for layer in range(3) for which in "kv"]
    zeros = {name: torch.zeros(1).to(torch.float8_e4m3fn) for name in names}
    broken(quantised, lambda tensors, config: tensors.update(zeros))
    found, expected = (load_model(directory).checkpoint_views() for directory in (quantised, dense))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    broken(quantised, lambda tensors, config: tensors.update({names[3]: torch.ones(1, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=f"Tensor {names[3]} in model.safetensors is not all zeros"):
        load_model(quantised)


def test_sparse_weights_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    quantised, _ = write_quantised(llama, tmp_path, "fp8 channel", both=False)
    broken(quantised, lambda tensors, config: config.update(sparsity_config={"format": "dense", "sparsity_structure": "2:4"}))
    load_model(quantised)

    def compress(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["sparsity_config"]["format"] = "sparse-24-bitmask"
        tensors[Q + "compressed"] = tensors.pop(Q + "weight")

    with pytest.raises(ModelError, match=r"^format in sparsity_config of quantization_config .* is 'sparse-24-bitmask'"):
        load_model(broken(quantised, compress))


def test_the_earlier_key_of_compressed_tensors(llama: Path, tmp_path: Path) -> None:
    quantised, dense = write_quantised(llama, tmp_path, "w8a8")
    raw = json.loads((quantised / "config.json").read_text())
    config = raw.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(raw | {"compression_config": config}))
    model = load_model(quantised)
    assert model.weight_format == "weights of compressed-tensors dequantised"
    found, expected = (each.checkpoint_views() for each in (model, load_model(dense)))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    (quantised / "config.json").write_text(json.dumps(raw | {"compression_config": config | {"quant_method": "new"}}))
    with pytest.raises(ModelError, match=r"^quant_method in compression_config of .* is 'new', which is not"):
        load_model(quantised)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", lambda t, c: c.update(quant_method="hqq"), "quant_method .* is 'hqq', which is not supported; use .* gptq"),
        ("gptq", lambda t, c: c.update(checkpoint_format="marlin"), "checkpoint_format in .* is 'marlin'"),
        ("gptq", lambda t, c: t.pop(Q + "scales"), "q_proj.qweight in model.safetensors has no scales beside it"),
        ("gptq", lambda t, c: t.pop(Q + "qzeros"), "parts of tensor .*q_proj.qweight .* do not fit together"),
        (
            "gptq",
            lambda t, c: t.update({Q + "qzeros": torch.zeros(2, 6, dtype=torch.int32)}),
            "has 3 bits; use a checkpoint in GPTQ",
        ),
        ("gptq", lambda t, c: t.update({Q + "scales": torch.ones(3, 64).half()}), "has 3 scales for 64 rows or columns"),
        ("gptq", lambda t, c: t.update({Q + "scales": torch.ones(2, 32).half()}), r"has scales of shape \[32, 2\]"),
        ("gptq", lambda t, c: t.update({Q + "g_idx": torch.full((64,), 7).int()}), "has an order of columns that is not"),
        ("gptq", lambda t, c: t.update({Q + "g_idx": torch.full((64,), -1).int()}), "has an order of columns that is not"),
        ("gptq", lambda t, c: t.update({Q + "qweight": t[Q + "qweight"].long()}), "has qweight of torch.int64"),
        ("gptq", lambda t, c: t.update({Q + "qweight": t[Q + "qweight"][:4]}), r"has shape \[64, 32\], not \[64, 64\]"),
        ("awq", lambda t, c: c.update(version="gemv"), "version in .* is 'gemv'"),
        ("awq", lambda t, c: c.update(group_size="x"), "group_size .* must be a whole number"),
        ("w4a16", lambda t, c: c.update(format="marlin-24"), "format in .* is 'marlin-24'"),
        ("w4a16", lambda t, c: c.update(transform_config={"r1": {}}), "transform_config in .* asks for rotations"),
        ("w4a16", lambda t, c: t.update({Q + "weight_shape": torch.tensor([64, 1 << 60])}), "do not fit together"),
        ("w4a16", lambda t, c: t.update({Q + "weight_shape": torch.tensor([64, -64])}), "do not fit together"),
        ("w4a16", lambda t, c: t.pop(Q + "weight_scale"), "has no weight_scale beside it"),
        ("fp8 channel", lambda t, c: t.update({Q + "weight_scale": torch.ones(64, 2, 2)}), "where two axes are expected"),
        (
            "fp8 channel",
            lambda t, c: t.update({Q + "weight": t[Q + "weight"].to(torch.float8_e5m2)}),
            "has weight of torch.float8_e5m2",
        ),
        ("fp8 block", lambda t, c: c.update(weight_block_size=[0, 32]), "weight_block_size .* must be two numbers"),
        ("fp8 block", lambda t, c: t.pop(Q + "weight_scale_inv"), "is stored as F8_E4M3, which is not supported"),
        ("nf4", lambda t, c: t.update({Q + "weight.quant_map": torch.ones(9)}), "has a quant_map of 9 numbers"),
        ("nf4", lambda t, c: t.update({Q + "weight.absmax": torch.ones(9)}), "has 9 scales for 4096 numbers"),
        (
            "nf4",
            lambda t, c: t.update({Q + "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"[{"), dtype=torch.uint8)}),
            "that is not JSON",
        ),
        (
            "nf4",
            lambda t, c: t.update(
                {Q + "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"shape": [1e9, -4]}'), dtype=torch.uint8)}
            ),
            "do not fit together",
        ),
    ],
)
def test_damaged_files_are_refused(llama: Path, tmp_path: Path, name: str, change: Callable[..., object], message: str) -> None:
    quantised, _ = write_quantised(llama, tmp_path, name, both=False)
    with pytest.raises(ModelError, match=message):
        load_model(broken(quantised, change))


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
"""Sides that every kind of execution takes."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "qwen2", **WIDE)


def logits(decoder: Decoder, count: int = 60) -> Tensor:
    tokens = torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return decoder.logits(decoder(tokens, torch.arange(count), causal_of(decoder.config))).float()


EXECUTED = [
    ("w4a16", torch.float32, CPU, WeightOnlyLinear, 1e-4),
    ("w4a16 channel", torch.float32, GPU, WeightOnlyLinear, 1e-4),
    ("w4a16 ordered", torch.float32, GPU, WeightOnlyLinear, 1e-4),
    ("w8a16", torch.float32, GPU, WeightOnlyLinear, 1e-4),
    ("gptq asymmetric ordered", torch.float32, GPU, WeightOnlyLinear, 1e-4),
    ("gptq asymmetric ordered", torch.bfloat16, GPU, WeightOnlyLinear, 3e-2),
    ("nvfp4", torch.bfloat16, GPU, WeightOnlyLinear, 3e-2),
    pytest.param("w8a8", torch.float32, CPU, Int8Linear, 3e-2, marks=multiplies_bytes),
    pytest.param("w8a8 tensor", torch.bfloat16, CPU, Int8Linear, 4e-2, marks=[multiplies_bytes, bfloat16]),
    ("w8a8", torch.float32, GPU, WeightOnlyLinear, 1e-4),
    ("bitsandbytes int8", torch.float32, GPU, WeightOnlyLinear, 1e-4),
    ("fp8 channel", torch.bfloat16, GPU, QuantizingLinear, 0.1),
    ("fp8 tensor", torch.bfloat16, GPU, QuantizingLinear, 0.1),
    ("fp8 block", torch.bfloat16, GPU, BlockScaledLinear, 0.1),
    ("fp8 block", torch.float32, CPU, WeightOnlyLinear, 1e-4),
    ("fp8 block cut off", torch.bfloat16, GPU, None, 3e-2),
    ("nf4", torch.float32, CPU, None, 1e-4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "device", "kind", "tolerance"), EXECUTED)
def test_codes_execute_as_they_are(
    wide: Path,
    tmp_path: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    kind: type | None,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the device has a product for them. Projections that are not quantised, alone or in a fused one, stay dense."""
    monkeypatch.setattr(stored, "supported", lambda device: device.type == "cuda")
    quantised, dense = write_quantised(wide, tmp_path, name)
    decoder, plain = load_model(quantised, dtype, "stored", device=device), load_model(dense)
    kinds = [type(layer.get_submodule(part)) for layer in decoder.layers for part in PROJECTIONS]
    if kind is None:
        assert {WeightOnlyLinear, Int8Linear, BlockScaledLinear, QuantizingLinear}.isdisjoint(kinds)
    elif kind is QuantizingLinear:
        assert kinds == [QuantizedLinear, QuantizingLinear, QuantizedLinear, QuantizedLinear, kinds[4], kind, kind, kinds[7]]
        assert {kinds[4], kinds[7]} <= {PackedLinear, Linear}
    else:
        assert kinds.count(kind) == 4 + 2
    for count in (60, 3):
        found, exact = logits(decoder, count), logits(plain, count)
        assert (found - exact).norm() < tolerance * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 channel", "fp8 tensor", "fp8 block"])
def test_each_product_in_fp8_is_near_that_of_dense_weights(
    wide: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of rounded inputs add up from layer to layer; each product has its own."""
    monkeypatch.setattr(stored, "supported", lambda device: device.type == "cuda")
    quantised, dense = write_quantised(wide, tmp_path, name)
    decoder, plain = load_model(quantised, torch.bfloat16, "stored", device=GPU), load_model(dense)
    compared = 0
    for layer, exact in zip(decoder.layers, plain.layers, strict=True):
        for part in PROJECTIONS:
            product, whole = layer.get_submodule(part), exact.get_submodule(part)
            if not isinstance(product, QuantizedLinear | BlockScaledLinear):
                continue
            x = torch.randn(60, whole.weight.shape[1]).bfloat16()
            given = x if isinstance(product, QuantizingLinear | BlockScaledLinear) else quantize_rows(x)
            with torch.inference_mode():
                found, expected = product(given).float(), whole(x.float())
            assert (found - expected).norm() < 3e-2 * expected.norm()
            compared += 1
    assert compared == 4 + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "device", "kind", "tolerance"),
    [
        ("w4a16", torch.float32, CPU, WeightOnlyGroupedLinear, 1e-4),
        ("awq", torch.float32, GPU, WeightOnlyGroupedLinear, 1e-4),
        ("fp8 block", torch.float32, GPU, WeightOnlyGroupedLinear, 1e-4),
        ("fp8 channel", torch.bfloat16, GPU, QuantizedGroupedLinear, 0.3),
        ("gptq asymmetric ordered", torch.float32, GPU, GroupedLinear, 1e-4),
    ],
)
def test_experts_execute_codes(
    tmp_path: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    kind: type,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "supported", lambda device: device.type == "cuda")
    source = make_checkpoint(tmp_path / "source", "mixtral", hidden_size=128, intermediate_size=128)
    quantised, dense = write_quantised(source, tmp_path, name, kept=())
    decoder = load_model(quantised, dtype, "stored", device=device)
    assert {type(layer.get_submodule(part)) for layer in decoder.layers for part in ("mlp.gate_up", "mlp.down")} == {kind}
    found, exact = logits(decoder), logits(load_model(dense))
    assert (found - exact).norm() < tolerance * exact.norm()


@pytest.mark.parametrize("family", ["glm4", "ernie4_5"])
@pytest.mark.parametrize(
    "form", [None, "stored", pytest.param(stored.IN_INT8, marks=multiplies_bytes), pytest.param("int8", marks=multiplies_bytes)]
)
def test_pairs_that_are_reordered(tmp_path: Path, family: str, form: str | None) -> None:
    """Their projection is made dense, whatever the format of the others."""
    source = make_checkpoint(tmp_path / "source", family, hidden_size=128, intermediate_size=128, head_dim=32)
    quantised, dense = write_quantised(source, tmp_path, "w8a16", kept=())
    decoder = load_model(quantised, torch.float32, form)
    assert isinstance(decoder.layers[0].get_submodule("mlp.down_proj"), WeightOnlyLinear) is (form == "stored")
    found, exact = logits(decoder), logits(load_model(dense))
    assert (found - exact).norm() < (1e-4 if form in (None, "stored") else 0.1) * exact.norm()


@multiplies_bytes
def test_experts_in_int8_are_converted(tmp_path: Path) -> None:
    """Projections of attention take the codes of the file beside them."""
    source = make_checkpoint(tmp_path / "source", "mixtral", hidden_size=128, intermediate_size=128)
    quantised, dense = write_quantised(source, tmp_path, "awq", kept=())
    decoder = load_model(quantised, torch.float32, stored.IN_INT8)
    assert isinstance(decoder.layers[0].get_submodule("mlp.down"), Int8GroupedLinear)
    found, exact = logits(decoder), logits(load_model(dense))
    assert (found - exact).norm() < 0.2 * exact.norm()


@multiplies_bytes
@pytest.mark.parametrize(
    ("name", "group", "bits"),
    [
        ("w4a16", 32, 4),
        ("w4a16 asymmetric", 32, 4),
        ("awq", 32, 4),
        ("w8a16", 32, 8),
        ("nvfp4", 16, 8),
        pytest.param("gptq asymmetric ordered", 0, 8, marks=pytest.mark.slow),
        pytest.param("fp8 block", 0, 8, marks=pytest.mark.slow),
    ],
)
def test_products_in_int8_take_codes_as_they_are(wide: Path, tmp_path: Path, name: str, group: int, bits: int) -> None:
    """Codes that they do not take, for which ``group`` is 0 here, become codes with a scale for each output."""
    quantised, dense = write_quantised(wide, tmp_path, name, kept=())
    decoder = load_model(quantised, torch.float32, stored.IN_INT8)
    parts = [layer.get_submodule(part) for layer in decoder.layers for part in PROJECTIONS]
    for part in parts:
        assert isinstance(part, Int8Linear)
        if group:
            assert isinstance(part.weight, Panels)
            assert (part.weight.group, part.weight.halved) == (group, bits == 4)
        elif isinstance(part.weight, Panels):
            assert part.weight.groups == 1
    found, exact = logits(decoder), logits(load_model(dense))
    assert (found - exact).norm() < (3e-2 if group else 4e-2) * exact.norm()


def scores(model: Path, **options: Any) -> tuple[str, str, Tensor]:
    """Arithmetic, fingerprint, and log-probabilities of labels."""
    loop = build_loop(EngineSettings(model=str(model), name="t", max_total_tokens=1024, device="cpu", **options))
    loop.submit(wire.Score("s", list(range(3, 50)), [[7, 8, 9], [10]], wire.Labels([1, 5, 2])))
    replies: list[wire.Reply] = []
    while not loop.idle:
        replies += loop.step()
    assert isinstance(replies[-1], wire.Scored), replies
    return loop.info.arithmetic, loop.info.fingerprint, torch.tensor(replies[-1].rows)


def test_the_engine_serves_a_quantised_checkpoint(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dense weights where memory allows, and in any case with those of the codes."""
    quantised, dense = write_quantised(wide, tmp_path, "gptq")
    expected = scores(dense)
    found = {option: scores(quantised, dequantize=option) for option in ("auto", "on", "off")}
    assert found["auto"][0] == "float32, weights of gptq dequantised"
    assert found["off"][0] == "float32, codes of gptq"
    assert found["auto"][1] == found["on"][1]
    assert len({expected[1], found["on"][1], found["off"][1]}) == 3
    for _, _, rows in found.values():
        torch.testing.assert_close(rows, expected[2], rtol=0, atol=1e-4)
    monkeypatch.setattr("yardstick_llm.engine.loop.build.available_memory", lambda: 1 << 20)
    assert scores(quantised)[0] == "float32, codes of gptq"
    with pytest.raises(ModelError, match="--dequantize off cannot be used with --quantize fp8, which converts dense weights"):
        scores(quantised, dequantize="off", quantize="fp8")
    assert scores(quantised, quantize="fp8")[0] == "float32, weights of gptq dequantised, matrix products in fp8"
    if (named := instructions()) is not None:
        in_int8 = {option: scores(quantised, dequantize=option, quantize="int8") for option in ("auto", "on", "off")}
        assert in_int8["auto"][0] == f"float32, codes of gptq, matrix products in int8 ({named})"
        assert in_int8["on"][0] == f"float32, weights of gptq dequantised, matrix products in int8 ({named})"
        assert in_int8["auto"][1] == in_int8["off"][1]
        assert len({each[1] for each in [*found.values(), *in_int8.values()]}) == 4
        for _, _, rows in in_int8.values():
            torch.testing.assert_close(rows, expected[2], rtol=0, atol=0.05)


MEASURE = """
import re, sys, torch
from yardstick_llm.engine.models.loader import load_model

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

torch.set_num_threads(1)
load_model(sys.argv[2], torch.float32, "stored")
open("/proc/self/clear_refs", "w").write("5")  # the peak is what there is now
before = peak()
decoder = load_model(sys.argv[1], torch.float32, "stored")
print(peak() - before)
"""


@pytest.mark.slow
def test_loading_takes_no_more_than_the_file_and_a_layer(wide: Path, tmp_path: Path) -> None:
    """In float32; 16 MiB for what does not grow with the model."""
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12, "head_dim": 64}
    source = make_checkpoint(tmp_path / "source", "qwen2", **shape, dtype=torch.bfloat16)
    quantised, _ = write_quantised(source, tmp_path, "gptq", kept=(), both=False)
    small, _ = write_quantised(wide, tmp_path / "small", "gptq", both=False)
    command = [sys.executable, "-c", MEASURE, str(quantised), str(small)]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    layers = [tensor.numel() for name, tensor in load_file(source / "model.safetensors").items() if "layers." in name]
    dense, file = 4 * sum(layers), (quantised / "model.safetensors").stat().st_size
    assert taken < file + dense / shape["num_hidden_layers"] + (16 << 20)
    assert taken < dense / 2


@pytest.mark.parametrize(
    ("name", "form", "dtype", "device", "tolerance", "cut"),
    [
        ("w4a16", stored.NAME, torch.float32, CPU, 1e-4, True),
        ("awq", stored.NAME, torch.float32, GPU, 1e-4, True),
        ("gptq asymmetric ordered", stored.NAME, torch.float32, GPU, 1e-4, False),
        ("w8a8", stored.NAME, torch.float32, CPU, 3e-2, True),
        ("fp8 channel", stored.NAME, torch.bfloat16, GPU, 3e-2, True),
        ("fp8 block", stored.NAME, torch.bfloat16, GPU, 3e-2, True),
        ("awq", stored.IN_INT8, torch.float32, CPU, 3e-2, True),
    ],
)
def test_processes_that_share_a_model_have_parts_of_its_codes(
    wide: Path,
    tmp_path: Path,
    name: str,
    form: str,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A projection is dense where its columns cannot be ``cut``, because groups of them are not side by side."""
    monkeypatch.setattr(stored, "supported", lambda device: device.type == "cuda")
    quantised, dense = write_quantised(wide, tmp_path, name, kept=())
    whole, config = load_model(quantised, dtype, form, device=device), load_config(quantised)
    for rank in range(2):
        coded, plain = ShardedDecoder(config, dtype, rank, 2), ShardedDecoder(config, torch.float32, rank, 2)
        load_part(coded, quantised, form, device)
        load_part(plain, dense)
        for part, layer, exact in zip(coded.layers, whole.layers, plain.layers, strict=True):
            for each in PROJECTIONS:
                product, expected = part.get_submodule(each), exact.get_submodule(each)
                if cut or each in ("attention.qkv_proj", "mlp.gate_up_proj"):
                    assert type(product) is type(layer.get_submodule(each))
                else:
                    assert isinstance(product, Linear | PackedLinear)
                x = torch.randn(60, expected.weight.shape[1]).to(dtype)
                quantised_by_the_norm = isinstance(product, QuantizedLinear) and not isinstance(product, QuantizingLinear)
                with torch.inference_mode():
                    found = product(quantize_rows(x) if quantised_by_the_norm else x).float()
                    wanted = expected(x.float())
                assert (found - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize(
    ("family", "name", "sizes", "expert_parallel"),
    [
        ("mixtral", "awq", {"intermediate_size": 128}, 1),
        ("qwen2_moe", "w4a16", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}, 2),
    ],
)
def test_processes_that_share_experts_have_parts_of_their_codes(
    tmp_path: Path, family: str, name: str, sizes: dict[str, int], expert_parallel: int
) -> None:
    quantised, dense = write_quantised(make_checkpoint(tmp_path / "source", family, hidden_size=128, **sizes), tmp_path, name)
    config, compared = load_config(quantised), 0
    for rank in range(2):
        coded, plain = (ShardedDecoder(config, torch.float32, rank, 2, expert_parallel) for _ in range(2))
        load_part(coded, quantised, stored.NAME)
        load_part(plain, dense)
        for key, part in coded.named_modules():
            if isinstance(part, WeightOnlyGroupedLinear):
                expected, codes = plain.get_submodule(key).get_parameter("weight"), part.weight
                found = dense_of(unpack_halves(codes.codes, codes.half), codes.scales, codes.zeros, codes.offsets)
                assert torch.equal(found, expected.flatten(0, 1))
                compared += 1
    assert compared >= 4


def test_processes_that_share_a_model_dequantise_their_parts(wide: Path, tmp_path: Path) -> None:
    quantised, dense = write_quantised(wide, tmp_path, "gptq asymmetric ordered")
    for rank in range(2):
        parts = []
        for directory in (quantised, dense):
            part = ShardedDecoder(load_config(directory), torch.float32, rank, 2)
            load_part(part, directory)
            parts.append(part)
        assert parts[0].weight_format == "weights of gptq dequantised"
        found, expected = (dict(part.named_parameters()) for part in parts)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
