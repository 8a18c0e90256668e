"""Engines on a GPU as they serve, with CUDA graphs and overlap, against the same model in float32 on a CPU."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import shards
from tests.checkpoints import make_checkpoint
from tests.encoders import make_whole
from tests.engine.adapters import write_adapter
from tests.engine.models.published_files import write_quantised
from tests.engine.parity import some_tokens
from tests.engine.test_loop import run
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.formats import fp8
from yardstick_llm.engine.settings import EngineSettings

FP8_SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
"""Sides that FP8's products take, and rows long enough to round like those of real models."""
ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "heads of 128": ("qwen3", {"head_dim": 128}, {}),
    "windows and soft caps": ("gemma2", {"sliding_window": 6}, {}),
    "experts": ("qwen3_moe", {}, {}),
    "keys and values in FP8": ("qwen3", FP8_SHAPE | {"head_dim": 128}, {"kv_dtype": "fp8"}),
    "products in FP8": ("qwen3", FP8_SHAPE, {"quantize": "fp8"}),
    "products with what follows": ("qwen3", {"hidden_size": 128, "head_dim": 128}, {"fused_products": True}),
    "products in FP8 with what follows": ("qwen3", FP8_SHAPE, {"quantize": "fp8", "fused_products": True}),
    "weights of 4 bits": ("qwen3", FP8_SHAPE, {"dequantize": "off"}),
    "adapters": ("qwen3", {"head_dim": 128}, {"max_loras_device": 2, "max_lora_rank": 16}),
    "adapters beside products in FP8": ("qwen3", FP8_SHAPE, {"quantize": "fp8", "max_loras_device": 2, "max_lora_rank": 16}),
}
"""Family, shape and settings by name. Two of three adapters have a place on the device."""

MOST_TOKENS = 2100
"""Tokens of a step; the largest CUDA graph has 2,048."""


GPU_ENCODERS = ("float32", "off"), ("float32", "on"), ("bfloat16", "on")
"""Dtypes and CUDA graphs."""


def messages(digests: list[str]) -> list[wire.Request]:
    """Scores in small steps, in large ones, and in one that is larger than CUDA graphs are; and generations."""
    rng, found = random.Random(3), list[wire.Request]()
    for number, digest in enumerate(digests):
        for size, items in (("small", (3, 1, 40)), ("large", (150,) * 9), ("short", (12,) * 170)):
            branches = [some_tokens(rng, length, length) for length in items]
            readout = wire.Labels([5, 9, 17])
            found.append(wire.Score(f"{size} {number}", some_tokens(rng, 30, 60), branches, readout, adapter=digest))
        for kind, given in (("greedy", {"temperature": 0.0}), ("drawn", {"seed": number, "temperature": 0.8})):
            sampling = wire.Sampling(max_tokens=6, ignore_eos=True, **given)
            found.append(wire.Generate(f"{kind} {number}", some_tokens(rng, 4, 9), sampling, logprobs=1, adapter=digest))
    rng.shuffle(found)
    return found


def scores_of(replies: list[wire.Reply]) -> dict[str, np.ndarray]:
    assert not [reply for reply in replies if isinstance(reply, wire.Failed)]
    return {reply.id: np.array(reply.rows) for reply in replies if isinstance(reply, wire.Scored)}


def engine(model: Path, adapters: list[Path], **given: Any) -> tuple[Loop, list[str]]:
    """And the digests of the adapters that requests may name."""
    lora = [f"{path.name}={path}" for path in adapters]
    sizes = {"max_total_tokens": 20_000, "max_batched_tokens": MOST_TOKENS}
    loop = build_loop(EngineSettings(model=str(model), name="t", lora=lora, **sizes, **given))
    return loop, ["", *(each.digest for each in loop.adapters.description.adapters)]


def checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """The model of :data:`ENGINES` to serve, and one with the weights that it stands for."""
    family, shape, given = ENGINES[name]
    model = make_checkpoint(folder / "model", family, **shape)
    return write_quantised(model, folder, "w4a16") if "dequantize" in given else (model, model)


def test_every_engine_has_a_process() -> None:
    assert sorted(ENGINES) == sorted(shards.ENGINE_NAMES)


def test_weights_of_4_bits_stay_codes(tmp_path: Path) -> None:
    model, dense = checkpoints("weights of 4 bits", tmp_path)
    served, _ = engine(model, [], device="cpu", dtype="float32", dequantize="off")
    plain, _ = engine(dense, [], device="cpu", dtype="float32")
    assert served.info.arithmetic == "float32, codes of compressed-tensors"
    message = wire.Score("s", [5, 6, 7], [[8, 9], [10]], wire.Labels([5, 9]))
    assert scores_of(run(served, message))["s"] == pytest.approx(scores_of(run(plain, message))["s"], abs=1e-4)


def check_attention(choice: wire.AttentionChoice, shape: dict[str, Any]) -> None:
    """Print it, and expect FlashInfer for heads of 128 where it is installed. It has no compiled modules for the others."""
    print(f"attention: {choice.backend} ({choice.reason})")
    if shape.get("head_dim") == 128 and find_spec("flashinfer") is not None:
        assert choice.backend == "flashinfer", choice.reason


@pytest.mark.parametrize("installed", [None, object()])
def test_fp8_without_its_module_is_noticed(
    installed: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "find_spec", lambda _: installed)
    _, shape, given = ENGINES["keys and values in FP8"]
    assert given["kv_dtype"] == "fp8"
    check_attention(wire.AttentionChoice("flashinfer", "installed, with a kernel for this model"), shape)
    with nullcontext() if installed is None else pytest.raises(AssertionError, match="not flashinfer: no module"):
        check_attention(wire.AttentionChoice("triton", "not flashinfer: no module"), shape)
    assert "attention: triton (not flashinfer: no module)" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_a_gpu_answers_as_a_cpu_and_compiles_nothing_late(
    name: str, tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shape, given = ENGINES[name]
    if given.get("quantize") == "fp8" and not fp8.supported(device):
        pytest.skip("no products of FP8")
    (model, dense), adapters = checkpoints(name, tmp_path), list[Path]()
    if "max_loras_device" in given:
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        kinds: list[dict[str, Any]] = [{}, {"targets": ("q_proj", "down_proj"), "rank": 7}, {"rank": 16}]
        adapters = [write_adapter(tmp_path / f"a{seed}", whole, seed=seed, **kind) for seed, kind in enumerate(kinds)]
    exact = {key: value for key, value in given.items() if key not in ("quantize", "kv_dtype", "dequantize")}
    plain, digests = engine(dense, adapters, device="cpu", dtype="float32", **exact)
    expected = scores_of(run(plain, *messages(digests)))
    served, digests = engine(model, adapters, device=device.type, dtype="bfloat16", cuda_graphs="on", **given)
    assert served.info.attention is not None
    with capsys.disabled():
        check_attention(served.info.attention, shape)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)  # and not that of the captures
    for _ in range(2):  # the second time from the prefix cache
        found = scores_of(run(served, *messages(digests)))
        apart = {key: np.abs(found[key] - rows) for key, rows in expected.items()}
        median = {key: float(np.median(each)) for key, each in apart.items()}
        assert max(median.values()) < (0.3 if "FP8" in name else 0.08), median
    stats = served.stats
    assert stats.late_compilations == 0
    assert 0 < stats.replayed_steps < stats.steps
    assert stats.adapter_swaps >= len(adapters)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_encoders_answer_as_on_a_cpu_and_compile_nothing_late(family: str, tmp_path: Path, device: torch.device) -> None:
    """In steps of a small and of a large CUDA graph, and in one that is larger than all; in float32 as launched steps answer."""
    model, rng, found = make_whole(tmp_path, family), random.Random(3), dict[tuple[str, str, str], np.ndarray]()
    sent = {"small": (3, 1, 40), "large": (100,) * 15, "short": (12,) * 170, "larger": (100,) * 21}
    texts = {name: [some_tokens(rng, length, length) for length in lengths] for name, lengths in sent.items()}
    for kind, dtype, graphs in (("cpu", "float32", "off"), *((device.type, *given) for given in GPU_ENCODERS)):
        loop = build_loop(
            EngineSettings(model=str(model), name="t", device=kind, dtype=dtype, cuda_graphs=graphs, max_batched_tokens=MOST_TOKENS)
        )
        for name, branches in texts.items():
            (rows,) = scores_of(run(loop, wire.Score(name, [], branches, wire.Embedding()))).values()
            found[kind, dtype, graphs] = np.concatenate([found.get((kind, dtype, graphs), rows[:0]), rows])
        assert loop.stats.late_compilations == 0
        assert loop.stats.replayed_steps == (len(texts) - 1 if graphs == "on" else 0)
    expected, launched, captured, rounded = found.values()
    np.testing.assert_allclose(launched, expected, atol=1e-3)
    np.testing.assert_allclose(captured, launched, atol=1e-4)
    assert (rounded * expected).sum(1).min() > 0.995
