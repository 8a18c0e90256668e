"""Quantised checkpoints: each format loads as the dense weights that its codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.engine.models.published_files import FORMATS, QUANTISED, write_quantised
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import load_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("name", FORMATS)
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
    quantised, _ = write_quantised(llama, tmp_path, name)
    with pytest.raises(ModelError, match=message):
        load_model(broken(quantised, change))
