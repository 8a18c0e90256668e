"""Passes over needed candidates only: where the branches lie, their values and keys, and the same draws as with all candidates.

On a CPU a stand-in records the captured work; tests marked ``gpu`` capture it in CUDA graphs.
"""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.loop import build
from engine.models.lenvm import load_lenvm
from engine.runner.attention.base import FixedBranches
from engine.runner.lenvm import graphs
from engine.runner.lenvm.graphs import Needs, PassGraphs, pack_needed
from kernels.candidates import Candidates
from tests.checkpoints import VOCAB_SIZE
from tests.engine.lenvm.plain import Plain
from tests.engine.lenvm.test_pass_graphs import (  # noqa: F401 (fixtures)
    SLOTS,
    build_pair,
    capture,
    captured_anywhere,
    checkpoints,
    filled,
    launched,
    short_chunks,
)
from tests.engine.lenvm.writing import guidance, guided, run, some_tokens, tokens_of, verify


def found_of(rng: random.Random, rows: int, columns: int, device: torch.device) -> tuple[Candidates, list[int]]:
    """Distinct ids, any counts, and the most candidates that each row may have."""
    most = [rng.randint(1, columns) for _ in range(rows)]
    counts = [rng.randint(1, limit) for limit in most]
    ids = torch.arange(rows * columns, device=device).view(rows, columns) % VOCAB_SIZE
    return Candidates(ids, torch.zeros_like(ids, dtype=torch.float32), torch.tensor(counts, device=device)), most


@pytest.mark.parametrize(
    ("width", "buckets"),
    [pytest.param(8, (2, 3), marks=pytest.mark.slow), (5, (2, 3))],
)
@torch.inference_mode()
def test_a_counted_pass_computes_what_the_full_pass_does(
    checkpoints,  # noqa: F811
    capture,  # noqa: F811
    device: torch.device,
    width: int,
    buckets: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and keys of needed candidates, from the record alone, pass after pass with other counts; padding is not touched."""
    monkeypatch.setattr(graphs, "LEAST_BRANCHES", 0)
    model, tolerance = load_lenvm(checkpoints[1]).to(device), 1e-4 if device.type == "cuda" else 1e-5
    kv = filled(model)
    passes = PassGraphs(model, [FixedBranches(kv, max(buckets), width)], capture, buckets)
    assert passes.add_counted(buckets)
    free, rng = np.random.default_rng(1).permutation(SLOTS).astype(np.int32), random.Random(2)
    for lengths, alive in (((30, 1), (True, False)), ((9,), (False,)), ((5, 40), (True, True)), ((33, 7), (False, False))):
        prefixes = [free[place : place + length] for place, length in enumerate(lengths)]
        rows = len(lengths)
        found, _ = found_of(rng, rows, width, device)
        undecided = torch.tensor(alive, device=device)
        drawn = torch.tensor([[rng.randrange(count)] for count in found.counts.tolist()], device=device)
        each, zero = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        packed = pack_needed(found, undecided, drawn, torch.tensor(lengths, device=device), each, zero, width)
        full, theirs = launched(model, kv, prefixes, width, found.ids.flatten(), found.counts)
        parts = passes.counted_bucket(prefixes, width)
        assert parts == min(size for size in buckets if size >= rows)
        passes.kept.keys.fill_(7.0)
        raw = passes.forward_counted(prefixes, width, parts, packed)
        needed = packed.branch_of < len(packed.tokens)
        branch, place = packed.branch_of[needed], needed.flatten()
        assert len(branch) == int(packed.total)
        torch.testing.assert_close(raw[branch], full[place], atol=tolerance, rtol=tolerance)
        for ours, expected in zip(passes.kept, theirs, strict=True):
            torch.testing.assert_close(ours[:, branch], expected[:, place], atol=tolerance, rtol=tolerance)
        assert (passes.kept.keys[:, parts * width :] == 7.0).all()
    assert passes.replayed == passes.replayed_counted == 4


def test_which_passes_are_counted(
    checkpoints,  # noqa: F811
    capture,  # noqa: F811
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large ones that fit a bucket, with slots for all prefixes."""
    monkeypatch.setattr(graphs, "LEAST_BRANCHES", 31)
    model = load_lenvm(checkpoints[1]).to(device)
    attention = FixedBranches(filled(model), 10, 5)
    passes = PassGraphs(model, [attention], capture, (10,))
    one = np.arange(4, dtype=np.int32)
    assert passes.counted_bucket([one] * 8, 5) is None  # none is captured
    assert passes.add_counted((8, 16))
    least = 7
    assert passes.counted_bucket([one] * least, 5) == 8
    assert passes.counted_bucket([one] * (least - 1), 5) is None
    assert passes.counted_bucket([one] * least, 8) is None
    assert passes.counted_bucket([one] * 9, 5) is None  # 16 is more than all buckets
    assert passes.counted_bucket([np.zeros(len(attention._tables), np.int32)] * least, 5) is None


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow):RuntimeWarning"
)  # rows behind the count have any content, and nobody reads them
def test_the_whole_engine_draws_the_same(
    checkpoints: tuple[Path, Path],  # noqa: F811
    captured_anywhere,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With two steps in flight, and passes of both kinds in turn: keys that a decided row leaves are read by later steps."""
    monkeypatch.setattr(graphs, "LEAST_BRANCHES", 0)
    monkeypatch.setattr(build, "COUNTED_PARTS", (2, 4))
    monkeypatch.setattr(build, "PARTS", (1, 2))
    monkeypatch.setattr(build, "format_of", lambda *_: None)  # weights as on a GPU
    rng, turns = random.Random(6), itertools.count()
    monkeypatch.setattr(Needs, "few", property(lambda self: next(turns) % 2 == 0))
    with caplog.at_level(logging.INFO, "engine.runner.lenvm.graphs"):
        loop = build_pair(checkpoints, cuda_graphs="on", dtype="float32")
    assert "captured for needed candidates of [2, 4] parts" in caplog.messages[-1]
    modes = (
        {"scale": 3.0, "entropy_threshold": 1.55},
        {"constraint": "eq", "target_length": 6, "entropy_threshold": 1.5},
        {"mode": "mul", "scale": 0.7, "gamma": 0.95},
        {"scale": -4.0, "entropy_threshold": 100.0},
    )
    messages = [
        guided(f"g{i}", some_tokens(rng, 2, 12), guidance(**mode), max_tokens=10 - i, min_p=(0.0, 0.7)[i % 2])
        for i, mode in enumerate(modes)
    ]
    replies, stats = run(loop, *messages), loop.stats
    assert loop._runner._lenvm.replayed_counted > 2
    assert stats.replayed_lenvm_passes > 0
    launching = build_pair(checkpoints, cuda_graphs="off", dtype="float32")
    expected, plain = run(launching, *messages), Plain(*checkpoints)
    for message in messages:
        assert tokens_of(replies[message.id]) == tokens_of(expected[message.id])
        for ours, theirs in zip(replies[message.id], expected[message.id], strict=True):
            assert np.exp(ours.logprobs.top[0]) == pytest.approx(np.exp(theirs.logprobs.top[0]), abs=1e-4)
            assert ours.logprobs.values[0] == pytest.approx(theirs.logprobs.values[0], abs=1e-4, nan_ok=True)
        if not torch.cuda.is_available():
            verify(plain, message, replies[message.id])
    assert stats.lenvm_tokens < launching.stats.lenvm_tokens
    assert stats.guided_draws == launching.stats.guided_draws > 0
    assert stats.decided_draws == launching.stats.decided_draws > 4
