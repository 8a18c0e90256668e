"""Keys and values in FP8, through the loop: scores, generations and the prefix cache beside those of the model's dtype."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine import wire
from engine.loop.build import build_loop
from engine.loop.loop import Loop
from engine.models.files import ModelError
from engine.models.loader import load_model
from engine.runner import machine as capacity
from engine.runner.machine import default_slots
from engine.settings import EngineSettings
from kernels.quantize import FP8
from tests.checkpoints import make_checkpoint
from tests.engine.parity import some_tokens
from tests.engine.test_item_scores import answer, message
from tests.engine.test_loop import run

LABELS = wire.Labels([5, 17, 300])


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), str(request.param), hidden_size=128, intermediate_size=128)


def make_loop(checkpoint: Path, **settings: object) -> Loop:
    return build_loop(EngineSettings(model=str(checkpoint), name="t", **({"max_total_tokens": 4096} | settings)))


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
    monkeypatch.setattr(capacity.cgroup, "available_memory", lambda: float(32 << 30))
    decoder = load_model(checkpoint)
    kept = [FP8], [torch.float32]
    few, many = (default_slots([decoder], dtypes, 1024) for dtypes in (kept[1], kept[0]))
    assert few > 1024
    assert many == pytest.approx(4 * few, rel=0.01)


def test_float16_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="--kv-dtype fp8 needs a range that float16 lacks"):
        make_loop(checkpoint, kv_dtype="fp8", dtype="float16")
