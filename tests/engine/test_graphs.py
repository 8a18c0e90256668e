"""Captured steps against launched ones: buckets, padding, tables of fixed size, replays, and the settings that choose them.

On a CPU a stand-in records the work; tests marked ``gpu`` capture it in CUDA graphs.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.encoders import make_encoder, make_whole
from tests.engine.device import no_waiting, skip_without_flashinfer
from tests.engine.late import LateGpu, LateTensor, computing
from tests.engine.parity import assert_equal_rows, some_tokens
from tests.engine.recording import Recorder
from tests.engine.test_loop import run
from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import EMPTY, Ints, as_ints
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.decoder import Decoder, FusedAttend
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.quantization import format_of
from yardstick_llm.engine.models.loader import load_encoder, load_model
from yardstick_llm.engine.models.modules import Experts
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import Request, ScoringRequest
from yardstick_llm.engine.runner import capturing
from yardstick_llm.engine.runner.attention.base import AttentionBackend, KVCache
from yardstick_llm.engine.runner.attention.flashinfer import (
    WRAPPER_BYTES,
    FixedFlashInfer,
    FlashInferAttention,
    fixed_bytes,
)
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention
from yardstick_llm.engine.runner.attention.select import make_attention
from yardstick_llm.engine.runner.attention.triton import FixedTritonAttention, TritonAttention
from yardstick_llm.engine.runner.attention.whole import FixedWholeAttention, WholeAttention
from yardstick_llm.engine.runner.capturing import large_graph_bytes, make_graphs
from yardstick_llm.engine.runner.distributed.shard import part_of
from yardstick_llm.engine.runner.graphs import GRAPH_BYTES, LARGE_BUCKETS, STREAMS, Captured, CudaCapture, StepGraphs
from yardstick_llm.engine.runner.machine import step_bytes
from yardstick_llm.engine.runner.runner import PendingStep, Runner
from yardstick_llm.engine.server.metrics import render
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import attention_layout
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec

SLOTS = 400
READ = 128
"""Rows that a large step reads, at least."""
BUCKETS = (1, 4, 13)


WINDOWED = {"num_hidden_layers": 2, "sliding_window": 6}
"""A window that is shorter than the contexts of :func:`mixed_steps`, in one of two layers."""
SHAPES: dict[str, dict[str, int]] = {
    "qwen3": {"num_hidden_layers": 2},
    "gemma2": WINDOWED,
    "gemma3": WINDOWED,
}
"""With QK-norm; with windows, soft caps and a scale; with windows and two rotations."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[] if family in ("qwen3", "gemma2") else pytest.mark.slow) for family in SHAPES],
)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Decoder:
    directory = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **SHAPES[request.param])
    return load_model(directory).to(device)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)


@pytest.fixture
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short contexts are cut, too, and the interpreter has less padding to run."""
    monkeypatch.setattr(attention_layout, "PROGRAMS", 8)
    monkeypatch.setattr(attention_layout, "MIN_CHUNK", 8)
    monkeypatch.setattr("yardstick_llm.engine.runner.attention.whole.FEW_BLOCKS", 4)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Recorder | CudaCapture:
    return CudaCapture(device) if device.type == "cuda" else Recorder(monkeypatch)


class Rerun:
    """Runs the work again with all its Python, for work that plans inside it."""

    allocated = 0

    def __call__(self, work) -> Captured:
        output = work()
        return Captured(output, lambda: output.copy_(work()))


class Replanned:
    """Any backend as one of fixed tables; padding is a run in the padding slot."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    layouts = 1

    def attend(self, tokens: int, layout: int = 0) -> FusedAttend:
        self.fill((), tokens)
        return FusedAttend(lambda layer, heads: self.planned.attend(layer, heads))

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> int:
        padding = tokens - sum(len(segment.tokens) for segment in segments)
        slots = np.full(padding, self.backend.kv.padding_slot, np.int32)
        self.planned = self.backend.plan([*segments, a_segment(slots, padding)] if padding else segments)
        return 0


def a_segment(context: Ints, new: int) -> ExtendSegment:
    return ExtendSegment(Request(id="r", prefix=EMPTY), None, np.zeros(new, np.int32), context)


def cache(decoder: Decoder, slots: int = SLOTS) -> KVCache:
    config, weight = decoder.config, decoder.embed.weight
    return KVCache(
        layers=config.num_layers,
        slots=slots,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )


def mixed_steps(seed: int = 0) -> Iterator[list[ExtendSegment]]:
    """A prompt, items on it with a decoded sequence beside them, single tokens, a chunk on all of it, one token."""
    free = np.random.default_rng(seed).permutation(SLOTS).astype(np.int32)
    places = itertools.count()

    def take(count: int) -> Ints:
        return free[[next(places) for _ in range(count)]]

    prompt = take(12)
    yield [a_segment(prompt, 12)]
    sequence = as_ints([prompt, take(1)])
    yield [a_segment(as_ints([prompt, take(count)]), count) for count in (5, 3, 1)] + [a_segment(sequence, 1)]
    sequences = [as_ints([sequence, take(1)]), as_ints([prompt[:7], take(1)]), take(1)]
    yield [a_segment(context, 1) for context in sequences]
    yield [a_segment(as_ints([sequences[0], take(11)]), 11)]
    yield [a_segment(as_ints([sequences[0], take(1)]), 1)]


def inputs(segments: Sequence[ExtendSegment], seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = np.concatenate(
        [np.arange(len(segment.context) - len(segment.tokens), len(segment.context)) for segment in segments]
    )
    tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, len(positions))
    return torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)


@torch.inference_mode()
def compare(decoder: Decoder, graphs: StepGraphs, kept: KVCache, eager: AttentionBackend, tolerance: float) -> None:
    """The graphs' steps and the same steps launched: hidden rows, and all that is kept but the padding."""
    device = kept.keys.device
    for seed, segments in enumerate(mixed_steps()):
        tokens, positions = inputs(segments, seed, device)
        expected = decoder(tokens, positions, eager.plan(segments))
        count = len(tokens)
        rows = torch.tensor([[], [count - 1], [*range(count)], [count - 1, 0]][seed % 4], dtype=torch.int64, device=device)
        found = graphs.forward(tokens, positions, segments, rows)
        assert found is not None
        torch.testing.assert_close(found, expected[rows], atol=tolerance, rtol=tolerance)
        for ours, theirs in ((kept.keys, eager.kv.keys), (kept.values, eager.kv.values)):
            torch.testing.assert_close(ours[:, :SLOTS], theirs[:, :SLOTS], atol=tolerance, rtol=tolerance)
    assert graphs.replayed == 5


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "whole"), [("gemma2", False), ("gemma3", True)], indirect=["decoder"])
def test_fixed_tables_give_what_launched_steps_give(decoder: Decoder, whole: bool, capture, small_work) -> None:
    """Replays the record alone; nothing in it plans again. What is not captured ``whole`` ends with the rows that are read."""
    kv = cache(decoder)
    heads, specs = decoder.config.num_heads, decoder.config.attention_specs
    graphs = StepGraphs(decoder, FixedTritonAttention(kv, heads, max(BUCKETS), specs), capture, BUCKETS, whole=whole)
    if kv.keys.is_cuda:
        compare(decoder, graphs, kv, TritonAttention(cache(decoder), heads, specs), 1e-4)
    else:
        compare(decoder, graphs, kv, ReferenceAttention(cache(decoder), heads, specs), 2e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_padding_changes_nothing_for_the_reference(decoder: Decoder, whole: bool) -> None:
    if decoder.embed.weight.is_cuda:
        pytest.skip("it computes on the CPU")
    heads, specs, kv = decoder.config.num_heads, decoder.config.attention_specs, cache(decoder)
    graphs = StepGraphs(decoder, Replanned(ReferenceAttention(kv, heads, specs)), Rerun(), BUCKETS, whole=whole)
    compare(decoder, graphs, kv, ReferenceAttention(cache(decoder), heads, specs), 2e-6)


def whole_steps() -> Iterator[list[ExtendSegment]]:
    """Pairs, a text alone, texts with tokens that none attends to, and steps with and without padding."""
    for lengths, first, unseen in (((3, 5, 9), 2, 0), ((7,), 0, 0), ((4, 4, 20), 0, 2), ((2, 3, 70), 1, 0), ((6, 10), 3, 0)):
        readout = wire.TokenVectors(expansion_tokens=unseen)
        request = ScoringRequest(id="r", prefix=EMPTY, readout=readout, rows=[], first_tokens=first)
        yield [ExtendSegment(request, None, np.zeros(count, np.int32), np.zeros(count, np.int32)) for count in lengths]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "whole"), [("bert", True), ("modernbert", False)])
@torch.inference_mode()
def test_captured_steps_of_whole_sequences(
    family: str, whole: bool, tmp_path: Path, capture, small_work, device: torch.device
) -> None:
    """As launched ones, with token types, windows and rotations; bit for bit where the same kernels compute as many rows."""
    directory = make_whole(tmp_path, family)
    model = load_encoder(directory).to(device)
    eager = WholeAttention(model.config.attention_specs, device, typed=family == "bert")
    graphs = StepGraphs(model, FixedWholeAttention(eager, 80), capture, (16, 28, 80), whole=whole)
    for seed, segments in enumerate(whole_steps()):
        tokens, positions = inputs(segments, seed, device)
        count = len(tokens)
        rows = torch.tensor([[*range(count)], [0], [], [count - 1, 0], [*range(count)]][seed], dtype=torch.int64, device=device)
        found = graphs.forward(tokens, positions, segments, rows)
        assert found is not None
        expected = model(tokens, positions, eager.plan(segments))
        tolerance = 1e-4 if device.type == "cuda" else 2e-5
        torch.testing.assert_close(found, expected[rows], atol=tolerance, rtol=tolerance)
        if device.type == "cpu" and count in (16, 28) and len(rows) in (0, count):
            same = FixedWholeAttention(eager, count)
            assert same.fill(segments, count) == 0
            assert torch.equal(found, model(tokens, positions, same.attend(count))[rows])
    assert graphs.replayed == 5


def test_steps_of_very_many_sequences_are_launched() -> None:
    """A captured step has room for all blocks of sequences of eight tokens on average."""
    fixed = FixedWholeAttention(WholeAttention([PLAIN], torch.device("cpu")), 1024)
    request = Request(id="r", prefix=EMPTY)
    for length, layout in ((8, 0), (6, None)):
        segments = [ExtendSegment(request, None, np.zeros(length, np.int32), EMPTY)] * (1024 // length)
        assert fixed.fill(segments, 1024) == layout


EVERYTHING: list[wire.Request] = [
    wire.Score("s", list(range(3, 20)), [[7, 8], [9], [10, 11, 12]], wire.Labels([1, 2])),
    wire.Generate("greedy", [5, 6], wire.Sampling(max_tokens=5, temperature=0, ignore_eos=True), logprobs=3),
    wire.Generate("drawn", [5, 7], wire.Sampling(max_tokens=4, seed=3, ignore_eos=True, n=2)),
    wire.Generate("echo", list(range(3, 30)), wire.Sampling(max_tokens=2, temperature=0), prompt_logprobs=1),
]


def answers(loop: Loop) -> dict[str, list[float]]:
    """Every number that is answered, by request."""
    for message in EVERYTHING:
        loop.submit(message)
    found: dict[str, list[float]] = {message.id: [] for message in EVERYTHING}
    while not loop.idle:
        for reply in loop.step():
            assert isinstance(reply, wire.Scored | wire.Delta), reply
            found[reply.id] += np.ravel(reply.rows).tolist() if isinstance(reply, wire.Scored) else numbers(reply)
    return found


def numbers(delta: wire.Delta) -> list[float]:
    logprobs = [part for part in (delta.logprobs, delta.prompt_logprobs) if part is not None]
    return [delta.index, *delta.tokens, *(value for part in logprobs for value in part.chosen if value is not None)]


def settings(checkpoint: Path, **changes) -> EngineSettings:
    defaults = {"max_total_tokens": SLOTS, "max_batched_tokens": 40, "max_running_requests": 4}
    return EngineSettings(model=str(checkpoint), name="t", **(defaults | changes))


@pytest.fixture
def captured_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where steps can be captured, by the stand-in."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(capturing, "_graphs_problem", lambda decoder: None)
        monkeypatch.setattr(capturing, "CudaCapture", lambda device: Recorder(monkeypatch))
        monkeypatch.setattr(capturing, "BUCKETS", (1, 4, 16))
        monkeypatch.setattr(capturing, "LARGE_BUCKETS", (30,))


@pytest.mark.slow
def test_the_whole_engine_answers_the_same(tmp_path: Path, captured_anywhere, small_work, caplog: pytest.LogCaptureFixture) -> None:
    """With two steps in flight, whose tokens the first one draws; some steps are too large for every bucket."""
    checkpoint = make_checkpoint(tmp_path, "gemma3", **SHAPES["gemma3"])
    given = {"overlap": True, "attention": "triton", "dtype": "float32"}
    launched = build_loop(settings(checkpoint, cuda_graphs="off", **given))
    with caplog.at_level(logging.INFO, "yardstick_llm.engine.runner.graphs"):
        captured = build_loop(settings(checkpoint, cuda_graphs="on", **given))
    expected, found = answers(launched), answers(captured)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert len(values) > 5
        assert found[name] == pytest.approx(values, abs=1e-4), name
    assert launched.stats.replayed_steps == 0
    assert 0 < captured.stats.replayed_steps < captured.stats.steps
    assert f"yardstick_engine_replayed_steps_total {captured.stats.replayed_steps}.0" in render(captured.stats)
    small, large = captured._runner._graphs
    assert small.replayed > 0
    assert large.replayed > 0
    assert caplog.messages[0].startswith("CUDA graphs: captured for 1, ")
    assert caplog.messages[1].startswith("CUDA graphs: captured for 30 tokens")


@pytest.mark.slow
def test_the_whole_engine_embeds_the_same(tmp_path: Path, captured_anywhere, small_work) -> None:
    """Steps of a small and of a large bucket, and one that is larger than all."""
    checkpoint, rng = make_whole(tmp_path, "qwen3"), random.Random(4)
    given = {"overlap": True, "dtype": "float32"}
    sent = [some_tokens(rng, length, length) for length in (1, 2, 12, 12, 25, 33)]
    rows = {}
    for graphs in ("off", "on"):
        loop = build_loop(settings(checkpoint, cuda_graphs=graphs, **given))
        messages = [wire.Score(str(place), sent[0], [each], wire.Embedding()) for place, each in enumerate(sent)]
        rows[graphs] = [scored.rows[0] for message in messages for scored in run(loop, message)]
        assert loop.stats.replayed_steps == (5 if graphs == "on" else 0)
    assert_equal_rows(rows["on"], rows["off"], 1e-4)


@pytest.mark.parametrize("family", ["mpnet", "deberta"])
def test_biases_of_attention_are_not_captured(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_encoder(make_encoder(tmp_path, family, num_hidden_layers=1))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert capturing._graphs_problem(model) == "plain PyTorch computes the model's biases of attention"


def test_where_graphs_cannot_be(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    decoder = load_model(checkpoint)
    attention = ReferenceAttention(cache(decoder), decoder.config.num_heads)
    assert make_graphs(decoder, attention, "auto", 48) == []
    assert make_graphs(decoder, attention, "off", 48) == []
    with pytest.raises(ModelError, match=r"CUDA graphs cannot be used here: they need an NVIDIA GPU\. Start without"):
        make_graphs(decoder, attention, "on", 48)

    def out_of_memory(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore of it.")

    monkeypatch.setattr(capturing, "_graphs_problem", lambda decoder: None)
    monkeypatch.setattr(capturing, "CudaCapture", out_of_memory)
    with caplog.at_level(logging.WARNING):
        assert make_graphs(decoder, attention, "auto", 48) == []
    assert caplog.messages == ["CUDA graphs: off, capturing them failed: CUDA out of memory"]
    with pytest.raises(ModelError, match=r"capturing them failed: CUDA out of memory\. "):
        make_graphs(decoder, attention, "on", 48)


@pytest.mark.parametrize("adapted", [False, True])
def test_large_steps_are_captured_where_their_memory_is_free(
    adapted: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With FlashInfer's tables, output and workspaces, whose sizes are those of the tensors that it makes."""
    workspaces = list[Tensor]()

    def wrapper(self: FlashInferAttention, workspace: Tensor, spec: AttentionSpec) -> None:
        workspaces.append(workspace)

    monkeypatch.setattr(FlashInferAttention, "wrapper", wrapper)
    monkeypatch.setattr("yardstick_llm.engine.runner.attention.flashinfer.multiprocessors", lambda _: 4)
    decoder = load_model(checkpoint)
    attention = FlashInferAttention(cache(decoder), decoder.config.num_heads)
    sizes = [size for size in LARGE_BUCKETS if size <= 2048]
    fixed = FixedFlashInfer(attention, sizes[-1])
    own = fixed._tables.nbytes + fixed._out.nbytes + workspaces[-1].nbytes
    assert fixed_bytes(attention, sizes[-1]) == own + WRAPPER_BYTES
    needed = large_graph_bytes(decoder, attention, sizes, adapted=adapted)
    graphs = 2 * (1 + adapted) * len(sizes) * GRAPH_BYTES
    assert needed > own + graphs + 2 * step_bytes(decoder, sizes[-1])

    monkeypatch.setattr(capturing, "_graphs_problem", lambda _: None)
    monkeypatch.setattr(capturing, "_capture", lambda *_: "small")
    monkeypatch.setattr(capturing, "_capture_large", lambda *_: "large")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    memory: Any = object() if adapted else None
    for free, expected in ((needed, ["small", "large"]), (needed - 1, ["small"])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1 << 40))
        assert make_graphs(decoder, attention, "auto", 2048, memory) == expected
    assert caplog.messages[-1].startswith("CUDA graphs of large steps: off, they need ")


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["auto", "fp8"])
@pytest.mark.parametrize("products", [None, "fp8"])
@torch.inference_mode()
def test_large_steps_with_flashinfer(products: str | None, kept: str, tmp_path: Path, device: torch.device) -> None:
    """Captured steps of a query and items, of many short segments, and of one long prompt are as far from the model in float32 as
    the same steps are when they are launched. Products of another number of rows round otherwise, which FP8 magnifies."""
    skip_without_flashinfer(device, 128, torch.bfloat16, torch.float8_e4m3fn if kept == "fp8" else None)
    shape = {"num_hidden_layers": 2, "head_dim": 128, "hidden_size": 256, "intermediate_size": 512}
    directory = make_checkpoint(tmp_path, "qwen3", **shape)
    exact, decoder = (load_model(directory, dtype).to(device) for dtype in (torch.float32, torch.bfloat16))
    if products is not None:
        decoder = load_model(directory, torch.bfloat16, format_of(products, device, torch.bfloat16)).to(device)
    sizes = [size for size in LARGE_BUCKETS if size <= 8192]
    ours, theirs = (make_attention(decoder, 20_000, "flashinfer", kept) for _ in range(2))
    reference = ReferenceAttention(cache(exact, 20_000), exact.config.num_heads)
    assert isinstance(ours, FlashInferAttention)
    capture = CudaCapture(device)
    graphs = StepGraphs(decoder, FixedFlashInfer(ours, sizes[-1]), capture, sizes, above=1024, whole=False)
    assert capture.allocated <= large_graph_bytes(decoder, ours, sizes, adapted=False)
    free = np.random.default_rng(0).permutation(20_000).astype(np.int32)
    query = free[:120]
    items = [as_ints([query, free[begin : begin + 180]]) for begin in range(120, 7800, 180)]
    short = [as_ints([query, free[begin : begin + 20]]) for begin in range(120, 4000, 20)]
    steps = [
        [a_segment(query, 120), *(a_segment(context, 180) for context in items)],
        [a_segment(query, 120), *(a_segment(context, 20) for context in short)],
        [a_segment(free[:5000], 5000), a_segment(free[5000:5001], 1)],
        [a_segment(query, 120), *(a_segment(context, 180) for context in items[:7])],
    ]
    errors = list[tuple[float, ...]]()
    for seed, segments in enumerate(steps * 2):
        tokens, positions = inputs(segments, seed, device)
        rows = torch.from_numpy(read_rows(segments)).to(device)
        expected = exact(tokens, positions, reference.plan(segments), rows)
        launched = decoder(tokens, positions, theirs.plan(segments), rows)
        found = graphs.forward(tokens, positions, segments, rows)
        assert found is not None
        errors.append(tuple(((each.float() - expected).norm() / expected.norm()).item() for each in (found, launched)))
    assert all(captured < 1.3 * plain + 1e-3 for captured, plain in errors), errors
    assert graphs.replayed == len(steps) * 2


def read_rows(segments: Sequence[ExtendSegment]) -> Ints:
    """The last row of each segment, and :data:`READ` rows of the whole step, because errors of a few rows vary too much."""
    ends = np.cumsum([len(segment.tokens) for segment in segments]) - 1
    return np.union1d(ends, np.linspace(0, ends[-1], READ, dtype=np.int64))


def test_every_large_step_reads_many_rows() -> None:
    """Also a step of two segments, which would read two rows otherwise."""
    free = np.arange(5001, dtype=np.int32)
    rows = read_rows([a_segment(free[:5000], 5000), a_segment(free[5000:], 1)])
    assert len(rows) >= READ
    assert {4999, 5000} <= {*rows.tolist()}
    assert rows.max() == 5000


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_steps_in_flight_are_launched_without_waiting(
    attention: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, several times over: a step's buffers are filled while the one before still runs."""
    if attention == "flashinfer":
        skip_without_flashinfer(device, 128, torch.bfloat16)
    model = make_checkpoint(tmp_path, "qwen3", head_dim=128)
    launched, captured = (
        build_loop(settings(model, attention=attention, overlap=True, cuda_graphs=graphs)) for graphs in ("off", "on")
    )
    expected = [answers(launched)["s"] for _ in range(5)]
    answers(captured)  # compiles what is outside of the graphs
    launch = Runner.launch

    def watched(runner: Runner, batch: Batch) -> PendingStep:
        with no_waiting():
            return launch(runner, batch)

    monkeypatch.setattr(Runner, "launch", watched)
    for values in expected:
        assert answers(captured)["s"] == pytest.approx(values, abs=0.1)
    assert captured.stats.replayed_steps > 20


def failing(work: Any) -> Any:
    """``work`` that fails when it is captured, which is the second time that it runs."""
    runs = itertools.count()

    def run() -> Tensor:
        output = work()
        if next(runs):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return output

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("error", ["of Python", "of CUDA"])
@torch.inference_mode()
def test_graphs_outlive_failed_captures_on_a_gpu(error: str, device: torch.device) -> None:
    """Split products, which need the workspace, also after other captures on all streams are gone, and then a new capture."""
    generator = torch.Generator(device).manual_seed(1)
    left, right = (torch.randn(size, device=device, generator=generator).bfloat16() for size in ((8, 16384), (16384, 64)))
    expected = (left @ right).float()
    capture, before = CudaCapture(device), torch.cuda.current_stream(device)
    captured = capture(lambda: left @ right)

    def waits() -> Tensor:
        product = left @ right
        if torch.cuda.is_current_stream_capturing() and error == "of CUDA":
            product.sum().item()
        return product

    with pytest.raises(RuntimeError):
        capture(failing(waits))
    assert torch.cuda.current_stream(device) == before
    for _ in range(STREAMS):
        CudaCapture(device)(lambda: left @ right)
    gc.collect()
    torch.cuda.synchronize(device)
    memory = [torch.full((1 << 20,), 7.0, device=device) for _ in range(64)]
    captured.output.fill_(float("nan"))
    captured.replay()
    torch.testing.assert_close(captured.output.float(), expected, atol=2.0, rtol=2e-2)
    assert all(bool((each == 7.0).all()) for each in memory)
    again = CudaCapture(device)(lambda: left @ right)
    again.replay()
    torch.testing.assert_close(again.output.float(), expected, atol=2.0, rtol=2e-2)


ROWS = 7


def check(mlp: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    """A graph of the layer that is captured with one input gives what the layer gives for others."""
    assert isinstance(mlp, Experts)
    inputs = torch.randn(3, ROWS, mlp.router.in_features, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = [mlp(x) for x in inputs]
        routed = {tuple(mlp.router(x).topk(mlp.chosen).indices.flatten().tolist()) for x in inputs}
        assert len(routed) == len(inputs)
        gpu = LateGpu(monkeypatch)
        copied = copy.deepcopy(mlp)
        with computing(gpu):
            late = gpu.move(copied)
            x = LateTensor(torch.zeros(ROWS, mlp.router.in_features))
            captured = gpu(lambda: late(x))
            for given, wanted in zip(inputs, expected, strict=True):
                gpu.run(gpu.queued)
                x.copy_(given)
                captured.replay()
                gpu.run(gpu.queued)
                assert (captured.output.data_ - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_a_replay_routes_what_it_finds(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(load_model(make_checkpoint(tmp_path, family)).layers[0].mlp, monkeypatch, 1e-5)


@pytest.mark.slow
def test_so_it_does_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a shared expert, whose product a late device does not have. The interpreter cuts codes off where others round."""
    model = make_checkpoint(tmp_path, "mixtral", intermediate_size=32)
    check(load_model(model, quantize="fp8").layers[0].mlp, monkeypatch, 0.2)


def test_so_it_does_with_some_of_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the other experts are not computed, whatever memory holds in their place."""
    config = load_config(make_checkpoint(tmp_path, "qwen3_moe", decoder_sparse_step=1))
    torch.manual_seed(0)
    mlp = Decoder(part_of(config, 1, 2, expert_parallel=2)).layers[0].mlp
    for parameter in mlp.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    check(mlp, monkeypatch, 1e-5)
