"""CUDA graphs of a model that two real processes share, joined by gloo: the same steps are replayed in both, or none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.shared_graphs import Outcome, Run, answers
from tests.processes import Pod, alive, wait_until
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner import capturing
from yardstick_llm.engine.runner.attention.base import KVCache
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention
from yardstick_llm.engine.runner.capturing import SharedCapture, captured, large_graph_bytes, make_graphs
from yardstick_llm.engine.runner.distributed.shard import PartLost, ShardedDecoder
from yardstick_llm.engine.runner.graphs import LARGE_BUCKETS, Captured
from yardstick_llm.engine.settings import EngineSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With windows, soft caps, and norms behind the sums."""
    return make_checkpoint(tmp_path_factory.mktemp("shared"), "gemma2", num_hidden_layers=2, sliding_window=6)


def settings(model: Path, **given: object) -> EngineSettings:
    sizes = {"max_batched_tokens": 40, "max_total_tokens": 400, "threads": 1}
    return EngineSettings(model=str(model), name="t", attention="reference", **(sizes | given))


@pytest.fixture(scope="module")
def alone(model: Path) -> list[dict[str, list[float]]]:
    """The answers of one process."""
    loop = build_loop(settings(model))
    return [answers(loop) for _ in range(2)]


class Pair:
    """Two processes that share a model; rank 0 has written its outcome, or ended without one."""

    def __init__(self, run: Run) -> None:
        self._folder = Path(run.folder)
        self._folder.mkdir()
        command = [sys.executable, "-m", "tests.engine.shared_graphs", msgspec.json.encode(run).decode()]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / "log").open("w") as log:
            self.leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self.leader.stdout is not None
        line = self.leader.stdout.readline()
        assert line, self.log
        self.outcome = msgspec.json.decode(line, type=Outcome)

    @property
    def log(self) -> str:
        """Lines of both processes."""
        return (self._folder / "log").read_text()

    def lines(self, rank: int) -> list[str]:
        return (self._folder / str(rank)).read_text().splitlines()

    @property
    def worker(self) -> int:
        """Process id of rank 1."""
        return int(self.lines(1)[0])

    def steps(self) -> list[str]:
        """Steps so far, from the file of each process. Fails where these differ."""
        first, second = (self.lines(rank)[1:] for rank in (0, 1))
        both = min(len(first), len(second))  # one may be a step ahead
        assert first[:both] == second[:both]
        return first[:both]

    def close(self) -> None:
        self.leader.kill()
        self.leader.wait()
        assert self.leader.stdout is not None
        self.leader.stdout.close()
        wait_until(lambda: not alive(self.worker))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """Start a pair."""
    pairs = []

    def start(graphs: str, **given: object) -> Pair:
        shared = settings(model, tensor_parallel=2, cuda_graphs=graphs, overlap=True)
        pairs.append(Pair(Run(shared, str(tmp_path / str(len(pairs))), **given)))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()


def check(outcome: Outcome, alone: list[dict[str, list[float]]]) -> None:
    for found, expected in zip(outcome.answers, alone, strict=True):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, abs=1e-4), name


@pytest.mark.slow
def test_both_processes_replay_the_same_steps_and_end_together(alone: list[dict[str, list[float]]], start) -> None:
    """Small graphs, the large one, and launched steps between them give the numbers of one process."""
    pair = start("on")
    check(pair.outcome, alone)
    assert 0 < pair.outcome.replayed < pair.outcome.steps
    steps = pair.steps()
    assert {"1 tokens, graphs above 0: replayed", "3 tokens, graphs above 0: replayed"} <= {*steps}
    assert any("above 16: replayed" in line for line in steps)
    assert "36 tokens, graphs above 16: launched" in steps
    assert sum("replayed" in line for line in steps) >= pair.outcome.replayed

    os.kill(pair.worker, signal.SIGKILL)
    assert pair.leader.wait(40) == 1
    assert "process 1 of the model ended with exit code -9" in pair.log or "PartLost" in pair.log


@pytest.mark.slow
def test_the_engine_does_not_start_where_one_cannot_capture(start) -> None:
    pair = start("on", failing=(1, 2))
    assert pair.outcome.problem == (
        "CUDA graphs cannot be used here: capturing them failed: another process of the model cannot capture them, and the log says"
        " why. Start without --cuda-graphs on."
    )
    assert "CUDA graphs: off, capturing them failed: CUDA out of memory\n" in pair.log


class Once:
    """Runs work before it is captured, and captures nothing."""

    allocated = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> Captured:
        return Captured(work(), lambda: None)


@pytest.fixture
def part(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> ShardedDecoder:
    """The part of a process whose other one always agrees, where graphs are possible."""
    monkeypatch.setattr(capturing, "_graphs_problem", lambda decoder: None)
    monkeypatch.setattr(ShardedDecoder, "least", lambda self, number: number)
    return ShardedDecoder(load_config(qwen3), torch.float32, 1, 2)


def test_an_error_in_the_run_before_the_capture_ends_the_engine(part: ShardedDecoder) -> None:
    """Another process may be waiting in that run."""

    def fails() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    capture = SharedCapture(Once(), part)
    assert captured("graphs", part, "on", lambda: capture(lambda: torch.ones(1))) is not None
    with pytest.raises(PartLost):
        captured("graphs", part, "auto", lambda: capture(fails))


def test_the_process_with_the_least_memory_decides_about_large_steps(
    part: ShardedDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attention = ReferenceAttention(KVCache(layers=2, slots=8, kv_heads=2, head_dim=8, dtype=torch.float32), 4)
    needed = large_graph_bytes(part, attention, [size for size in LARGE_BUCKETS if size <= 2048], adapted=False)
    monkeypatch.setattr(capturing, "_capture", lambda *_: "small")
    monkeypatch.setattr(capturing, "_capture_large", lambda *_: "large")
    monkeypatch.setattr(capturing, "_free_bytes", lambda *_: needed + 1)
    for least, expected in ((needed, ["small", "large"]), (needed - 1, ["small"])):
        elsewhere = {needed + 1: least}
        monkeypatch.setattr(ShardedDecoder, "least", lambda _, number, elsewhere=elsewhere: elsewhere.get(number, number))
        assert make_graphs(part, attention, "on", 2048) == expected
    (told,) = caplog.messages
    assert told.startswith("CUDA graphs of large steps: off, they need ")


def test_a_capture_that_fails_elsewhere_is_none(
    part: ShardedDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ShardedDecoder, "least", lambda self, number: 0)
    for capture in (lambda: SharedCapture(Once(), part)(lambda: torch.ones(1)), lambda: torch.ones(1)):
        assert captured("graphs", part, "auto", capture) is None
        with pytest.raises(ModelError, match="graphs cannot be used here: capturing them failed: another process of the model"):
            captured("graphs", part, "on", capture)
    assert len(caplog.messages) == 4


@pytest.mark.gpu
def test_two_gpus_answer_as_one(tmp_path: Path) -> None:
    """In steps of small and of large graphs, in one that is larger than all, and decoding."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    model = make_checkpoint(tmp_path, "qwen3", head_dim=128)
    rng = np.random.default_rng(0)
    scores = [
        wire.Score(name, rng.integers(0, 90, 30).tolist(), rng.integers(0, 90, shape).tolist(), wire.Labels([5, 9, 17]))
        for name, shape in (("small", (3, 40)), ("large", (9, 150)), ("larger", (170, 12)))
    ]
    greedy = wire.Generate("greedy", [5, 6, 7], wire.Sampling(max_tokens=20, temperature=0, ignore_eos=True, n=2), logprobs=1)
    found = []
    for processes in ("1", "2"):
        flags = ["--device", "cuda", "--dtype", "float32", "--cuda-graphs", "on", "--max-batched-tokens", "2100"]
        with Pod(model, "--tensor-parallel", processes, *flags).wait_ready() as pod:
            rows = [pod.ask("/score", message)[1].rows for message in [*scores, *scores]]  # the second time from the prefix cache
            tokens = [token for reply in pod.stream(greedy) for token in reply.tokens]
            replayed = re.search(r"^yardstick_engine_replayed_steps_total (\S+)$", pod.client.get("/metrics").text, re.MULTILINE)
        assert replayed is not None
        assert float(replayed[1]) > 20
        found.append((np.concatenate([np.ravel(each) for each in rows]), tokens))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-3)
    assert found[1][1] == found[0][1]
