"""Captured passes of the length model against launched ones, and passes over needed candidates only.

On a CPU a stand-in records the work; tests marked ``gpu`` capture it in CUDA graphs.
"""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.device import no_waiting
from tests.engine.lenvm.plain import GAMMA, Plain, make_lenvm_checkpoint
from tests.engine.lenvm.writing import guidance, guided, run, tokens_of, verify
from tests.engine.parity import some_tokens
from tests.engine.recording import Recorder
from tests.engine.test_graphs import cache
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.loop import build
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.lenvm import LenVM, load_lenvm
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.runner import capturing
from yardstick_llm.engine.runner.attention.base import FixedBranches, KVCache, plan_branches
from yardstick_llm.engine.runner.graphs import CudaCapture
from yardstick_llm.engine.runner.lenvm import graphs
from yardstick_llm.engine.runner.lenvm.graphs import Needs, PassGraphs, pack_needed
from yardstick_llm.engine.runner.lenvm.passes import Kept
from yardstick_llm.engine.runner.runner import PendingStep
from yardstick_llm.engine.server.metrics import render
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import branch_attention
from yardstick_llm.kernels.candidates import Candidates

SLOTS = 200
SHAPE = {"head_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    base = make_checkpoint(directory / "base", "qwen3", **(SHAPE | {"num_hidden_layers": 1}))
    return base, make_lenvm_checkpoint(directory / "lenvm", "qwen3", **SHAPE)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prefixes are cut, too, but not into many."""
    monkeypatch.setattr(branch_attention, "MIN_CHUNK", 8)
    monkeypatch.setattr(branch_attention, "PROGRAMS", 4)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Recorder | CudaCapture:
    return CudaCapture(device) if device.type == "cuda" else Recorder(monkeypatch)


def filled(model: LenVM) -> KVCache:
    kv = cache(model.decoder, SLOTS)
    kv.keys.normal_()
    kv.values.normal_()
    return kv


def launched(model: LenVM, kv: KVCache, prefixes: list[Ints], width: int, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Kept]:
    """The pass as it is without graphs."""
    kept = Kept.room(kv, len(tokens))
    positions = torch.tensor([len(prefix) for prefix in prefixes for _ in range(width)], device=tokens.device)
    attend = plan_branches(kv, prefixes, [width] * len(prefixes), counts)
    return model.head(model(tokens, positions, kept.attend(attend))), kept


@pytest.mark.slow
@torch.inference_mode()
def test_a_captured_pass_is_the_launched_one(checkpoints: tuple[Path, Path], capture, device: torch.device) -> None:
    """In every bucket, with and without padding, from the record alone; of larger buckets nothing is written."""
    width, buckets = 8, (1, 3)
    model = load_lenvm(checkpoints[1]).to(device)
    kv = filled(model)
    before = kv.keys.clone(), kv.values.clone()
    other = FixedBranches(kv, max(buckets), 13 - width)
    graphs = PassGraphs(model, [FixedBranches(kv, max(buckets), width), other], capture, buckets)
    free = np.random.default_rng(1).permutation(SLOTS).astype(np.int32)
    generator, tolerance = torch.Generator().manual_seed(2), 1e-4 if kv.keys.is_cuda else 1e-5
    for lengths in ((30, 1, 17), (9,), (5, 40), (33,)):
        prefixes = [free[place : place + length] for place, length in enumerate(lengths)]
        tokens = torch.randint(VOCAB_SIZE, (len(lengths) * width,), generator=generator).to(device)
        counts = torch.tensor([max(1, width - 3 * row) for row in range(len(lengths))], device=device)
        expected, theirs = launched(model, kv, prefixes, width, tokens, counts)
        graphs.kept.keys.fill_(7.0)
        found = graphs.forward(prefixes, width, tokens, counts)
        assert found is not None
        real = (torch.arange(width, device=device) < counts.unsqueeze(1)).flatten()
        torch.testing.assert_close(found[real], expected[real], atol=tolerance, rtol=tolerance)
        ours = graphs.kept.first(len(tokens))
        torch.testing.assert_close(ours.keys[:, real], theirs.keys[:, real], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(ours.values[:, real], theirs.values[:, real], atol=tolerance, rtol=tolerance)
        rows = min(size for size in buckets if size >= len(lengths))
        assert (graphs.kept.keys[:, rows * width :] == 7.0).all()  # of larger buckets
    assert torch.equal(kv.keys, before[0])
    assert torch.equal(kv.values, before[1])
    assert graphs.replayed > 1


@torch.inference_mode()
def test_rows_that_are_missing_attend_to_nothing(checkpoints: tuple[Path, Path], capture, device: torch.device) -> None:
    """Whatever the pass before had there: a NaN in the cache would show."""
    model = load_lenvm(checkpoints[1]).to(device)
    kv = filled(model)
    attention = FixedBranches(kv, 4, 2)
    graphs = PassGraphs(model, [attention], capture, (4,))
    prefixes = [np.arange(6, dtype=np.int32) + 10 * row for row in range(4)]
    tokens, counts = torch.arange(8, device=device), torch.full((4,), 2, device=device)
    whole = graphs.forward(prefixes, 2, tokens, counts)
    assert whole is not None
    assert len(whole) == 8
    expected = whole[:2].clone()
    kv.keys[:, 10:] = float("nan")
    kv.values[:, 10:] = float("nan")
    alone = graphs.forward(prefixes[:1], 2, tokens[:2], counts[:1])
    torch.testing.assert_close(alone, expected)
    assert attention.positions(4).tolist() == [6, 6] + [0] * 6
    assert graphs.kept.keys.isfinite().all()
    assert graphs._graphs.replay((4, 2), tokens[:2], counts[:1]).isfinite().all()


@pytest.fixture
def captured_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where passes can be captured, by the stand-in; the base model's steps are launched."""
    monkeypatch.setattr(build, "make_graphs", lambda *_: [])
    monkeypatch.setattr(build, "PARTS", (1, 3))
    if not torch.cuda.is_available():
        monkeypatch.setattr(capturing, "_graphs_problem", lambda decoder: None)
        monkeypatch.setattr(build, "CudaCapture", lambda device: Recorder(monkeypatch))


def build_pair(checkpoints: tuple[Path, Path], **settings) -> Loop:
    base, length = map(str, checkpoints)
    defaults = {"max_total_tokens": SLOTS, "lenvm_gamma": GAMMA, "overlap": True, "attention": "triton"}
    return build_loop(EngineSettings(model=base, name="t", lenvm_model=length, **(defaults | settings)))


@pytest.mark.gpu
def test_captured_passes_in_flight_do_not_wait(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, many rows and several times over: a pass's tables are filled while the one before still runs."""
    rng = random.Random(5)
    messages = [guided(f"g{i}", some_tokens(rng, 2, 12), guidance(scale=3.0), max_tokens=30) for i in range(20)]
    given = {"dtype": "bfloat16", "max_total_tokens": 4096}
    captured = build_pair(checkpoints, cuda_graphs="on", **given)
    run(captured, *messages)  # compiles what is outside of the graphs
    launch = captured._runner.launch

    def watched(batch: Batch) -> PendingStep:
        with no_waiting():
            return launch(batch)

    monkeypatch.setattr(captured._runner, "launch", watched)
    first, *others = [run(captured, *messages) for _ in range(4)]
    assert captured.stats.replayed_lenvm_passes > 100
    for replies in others:
        for message in messages:
            assert tokens_of(replies[message.id]) == tokens_of(first[message.id])
    values = [
        {reply.id: reply.logprobs.values[0] for reply in run(loop, *messages)[message.id][:1]}
        for loop in (captured, build_pair(checkpoints, cuda_graphs="off", **given))
        for message in messages[:3]
    ]
    for ours, theirs in zip(values[:3], values[3:], strict=True):
        for name, expected in theirs.items():
            assert sorted(ours[name]) == pytest.approx(sorted(expected), abs=0.05)


def found_of(rng: random.Random, rows: int, columns: int, device: torch.device) -> tuple[Candidates, list[int]]:
    """Distinct ids, any counts, and the most candidates that each row may have."""
    most = [rng.randint(1, columns) for _ in range(rows)]
    counts = [rng.randint(1, limit) for limit in most]
    ids = torch.arange(rows * columns, device=device).view(rows, columns) % VOCAB_SIZE
    return Candidates(ids, torch.zeros_like(ids, dtype=torch.float32), torch.tensor(counts, device=device)), most


@pytest.mark.slow
@pytest.mark.parametrize(("width", "buckets"), [(8, (2, 3)), (5, (2, 3))])
@torch.inference_mode()
def test_a_counted_pass_computes_what_the_full_pass_does(
    checkpoints,
    capture,
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
    checkpoints,
    capture,
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
def test_the_whole_engine_draws_the_same_from_needed_candidates(
    checkpoints: tuple[Path, Path],
    captured_anywhere,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With two steps in flight, and passes of both kinds in turn: keys that a decided row leaves are read by later steps. Prompts,
    wider draws and more rows than any bucket has are launched between."""
    monkeypatch.setattr(graphs, "LEAST_BRANCHES", 0)
    monkeypatch.setattr(build, "COUNTED_PARTS", (2, 4))
    monkeypatch.setattr(build, "PARTS", (1, 2))
    monkeypatch.setattr(build, "format_of", lambda *_: None)  # weights as on a GPU
    rng, turns = random.Random(6), itertools.count()
    monkeypatch.setattr(Needs, "few", property(lambda self: next(turns) % 2 == 0))
    with caplog.at_level(logging.INFO, "yardstick_llm.engine.runner.lenvm.graphs"):
        loop = build_pair(checkpoints, cuda_graphs="on", dtype="float32")
    assert caplog.messages[0].startswith("CUDA graphs of the length model: captured for 1, 2 parts of 5 or 8 candidates in ")
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
    messages.append(guided("wide", some_tokens(rng, 2, 5), guidance(scale=2.0, top_k=11), max_tokens=2))
    replies, stats = run(loop, *messages), loop.stats
    assert loop._runner._lenvm.replayed_counted > 2
    assert 0 < stats.replayed_lenvm_passes < stats.steps
    assert f"yardstick_engine_replayed_lenvm_passes_total {stats.replayed_lenvm_passes}.0" in render(stats)
    launching = build_pair(checkpoints, cuda_graphs="off", dtype="float32")
    expected, plain = run(launching, *messages), Plain(*checkpoints)
    assert launching.stats.replayed_lenvm_passes == 0
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
