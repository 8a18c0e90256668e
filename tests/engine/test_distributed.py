"""One model in two real processes, joined by gloo, gives the numbers of one process; no process is left behind."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.models.published_files import write_quantised
from tests.processes import Pod, alive, wait_until
from tests.processor import INT8
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import fingerprint
from yardstick_llm.engine.runner.distributed.shard import ShardedDecoder, Workers, load_part, part_of
from yardstick_llm.engine.settings import EngineSettings

SCORE = wire.Score("s", list(range(3, 80)), [[7, 8, 9], [10], list(range(20, 60)), [7, 8, 30]], wire.Labels([1, 5, 2]))
GREEDY = wire.Sampling(max_tokens=12, temperature=0, ignore_eos=True, n=2)
GENERATE = wire.Generate("g", list(range(5, 45)), GREEDY, logprobs=3, prompt_logprobs=1)
SETTINGS = {"max_batched_tokens": 48, "max_total_tokens": 1024}
"""A small budget, so that prompts are computed in chunks, beside one another."""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Start a pod whose model is in two processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pods = []

    def start(model: Path, *more: str) -> Pod:
        flags = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        pods.append(Pod(model, "--tensor-parallel", "2", *flags, *more))
        return pods[-1].wait_ready()

    yield start
    for pod in pods:
        pod.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers(pid: int) -> list[int]:
    """The children that compute, and neither the one that checks grammars nor one of :mod:`tests.warm`."""
    files = {child: Path(f"/proc/{child}") for child in children(pid)}
    return [
        child
        for child, file in files.items()
        if b"checker" not in (file / "cmdline").read_bytes() and (file / "comm").read_text() != "warm\n"
    ]


def answers(model: Path, **given: str) -> dict[str, list[wire.Reply]]:
    """Return the answers of one process."""
    loop = build_loop(EngineSettings(model=str(model), name="alone", **SETTINGS, **given))
    loop.submit(SCORE)
    loop.submit(GENERATE)
    replies: dict[str, list[wire.Reply]] = {"s": [], "g": []}
    while not loop.idle:
        for reply in loop.step():
            replies[reply.id].append(reply)
    return replies


def drawn(replies: list[wire.Reply], index: int) -> list[int]:
    return [token for reply in replies if reply.index == index for token in reply.tokens]


def logprobs(replies: list[wire.Reply]) -> list[float]:
    """Return the log-probabilities of the first sequence's tokens and their alternatives, and of the prompt's."""
    first = [reply for reply in replies if reply.index == 0]
    prompt = [value for reply in first if reply.prompt_logprobs for value in reply.prompt_logprobs.chosen if value is not None]
    assert len(prompt) == len(GENERATE.prompt) - 1
    return prompt + [value for reply in first for value in [*reply.logprobs.chosen, *reply.logprobs.top[0]]]


def killed_loop(pod: Pod, worker: int) -> None:
    os.kill(pod.loop_pid, signal.SIGKILL)
    wait_until(lambda: not alive(worker))
    assert pod.process.wait(40) == 1


def killed_worker_in_a_step(pod: Pod, worker: int) -> None:
    reader, replies = wire.FrameReader(), []
    message = wire.Generate("g", [5, 6], wire.Sampling(max_tokens=1000, ignore_eos=True))
    with pod.client.stream("POST", "/generate", content=wire.encode(message)) as response:
        for chunk in response.iter_raw():
            if not replies:
                os.kill(worker, signal.SIGKILL)
            replies += reader.feed(chunk)
    assert (replies[-1].code, replies[-1].retryable) == ("internal", True)
    assert pod.process.wait(40) == 1
    assert pod.process.stderr.read().splitlines()[-1] == "engine: The engine's loop ended with exit code 1."


def killed_idle_worker(pod: Pod, worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    assert pod.process.wait(40) == 1
    lines = pod.process.stderr.read().splitlines()
    assert any("process 1 of the model ended with exit code -9" in line for line in lines)
    assert lines[-1].startswith("engine: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more", "end"),
    [
        ("gemma2", (), killed_worker_in_a_step),
        ("qwen2_moe", (), killed_loop),
        ("qwen2_moe", ("--expert-parallel", "2"), killed_idle_worker),
    ],
    indirect=["model"],
)
def test_two_processes_give_the_numbers_of_one_and_end_together(
    model: Path, more: tuple[str, ...], end: Callable[[Pod, int], None], start
):
    """With biases of queries, keys and values, with norms behind the sums, with experts and with whole experts."""
    alone, pod = answers(model), start(model, *more)
    for _ in range(2):  # the second time on cached keys and values
        status, scored = pod.ask("/score", SCORE)
        assert status == 200
        torch.testing.assert_close(scored.rows, alone["s"][0].rows, rtol=0, atol=1e-5)
        generated = pod.stream(GENERATE)
        assert [drawn(generated, index) for index in (0, 1)] == [drawn(alone["g"], index) for index in (0, 1)]
        torch.testing.assert_close(logprobs(generated), logprobs(alone["g"]), rtol=0, atol=1e-5)
    (worker,) = workers(pod.loop_pid)
    end(pod, worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codes",
    [
        {"quantize": "fp8"},
        INT8,
        {"kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_two_quantised_processes_are_as_near_as_one(qwen3: Path, start, codes: dict[str, str]):
    """Each finds scales of weights for its own part, so the numbers are not those of one process, and no further from the
    unquantised. Keys and values have scales for each head, so only a code that rounds to the other side differs."""
    plain, alone = (torch.tensor(answers(qwen3, **given)["s"][0].rows) for given in ({}, codes))
    pod = start(qwen3, *(text for name, value in codes.items() for text in (f"--{name.replace('_', '-')}", value)))
    found = torch.tensor(pod.ask("/score", SCORE)[1].rows)
    assert 0 < (found - plain).norm() < 2 * (alone - plain).norm()
    assert (found - alone).norm() < (2 if "quantize" in codes else 0.5) * (alone - plain).norm()
    info = pod.read("/info", wire.Info)
    assert info.fingerprint == fingerprint(qwen3, torch.float32, codes.get("quantize"), 2, codes.get("kv_dtype", "auto"))
    assert codes.get("quantize", "") in info.arithmetic


@pytest.mark.slow
def test_two_processes_share_the_codes_of_a_checkpoint(start, tmp_path: Path):
    """In the memory of the codes, and with the numbers of one process that multiplies with them."""
    source = make_checkpoint(tmp_path / "source", "qwen2", hidden_size=128, intermediate_size=256, head_dim=64)
    quantised, _ = write_quantised(source, tmp_path, "w4a16 asymmetric")
    shutil.copy(source / "tokenizer.json", quantised)
    alone, pod = answers(quantised, dequantize="off"), start(quantised, "--dequantize", "off")
    torch.testing.assert_close(pod.ask("/score", SCORE)[1].rows, alone["s"][0].rows, rtol=0, atol=1e-4)
    assert drawn(pod.stream(GENERATE), 0) == drawn(alone["g"], 0)
    info = pod.read("/info", wire.Info)
    assert "codes of compressed-tensors" in info.arithmetic
    assert info.fingerprint == fingerprint(quantised, torch.float32, "stored", 2)


@pytest.mark.parametrize(
    ("family", "processes", "experts", "problem"),
    [
        ("qwen3_moe", 2, 3, "--expert-parallel is 3, but must be 1 or --tensor-parallel, which is 2"),
        ("qwen3_moe", 1, 2, "--expert-parallel is 2, but must be 1 or --tensor-parallel, which is 1"),
        ("qwen3", 2, 2, "--expert-parallel shares experts, and Qwen3ForCausalLM has none; leave it out"),
    ],
)
def test_experts_that_cannot_be_shared_whole(family: str, processes: int, experts: int, problem: str, tmp_path: Path):
    model = make_checkpoint(tmp_path, family)
    with pytest.raises(ModelError, match=problem):
        build_loop(EngineSettings(model=str(model), name="t", tensor_parallel=processes, expert_parallel=experts))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"num_experts": 5}, "5 experts cannot be shared evenly by 2 processes"),
        ({"shared_expert_intermediate_size": 41}, "41 inner columns of the shared expert cannot be shared evenly by 2 processes"),
    ],
)
def test_uneven_experts_are_refused(overrides: dict[str, int], problem: str, tmp_path: Path):
    config = load_config(make_checkpoint(tmp_path, "qwen2_moe", **overrides))
    with pytest.raises(ModelError, match=problem):
        part_of(config, 0, 2, 2)


@pytest.mark.parametrize(("size", "what"), [(4, "2 key-value heads"), (3, "4 attention heads")])
def test_heads_that_cannot_be_shared_are_refused(qwen3: Path, size: int, what: str):
    before = children(os.getpid())  # a browser of other tests, perhaps
    with pytest.raises(ModelError, match=f"{what} cannot be shared evenly by {size} processes"):
        build_loop(EngineSettings(model=str(qwen3), name="t", tensor_parallel=size))
    assert children(os.getpid()) == before


def test_another_models_weights_are_refused(qwen3: Path, tmp_path: Path):
    other = make_checkpoint(tmp_path, "qwen3", intermediate_size=128)
    decoder = ShardedDecoder(load_config(qwen3), torch.float32, 1, 2)
    with pytest.raises(ModelError, match=r"has shape \[128, 64\], not \[96, 64\]"):
        load_part(decoder, other)


@pytest.mark.slow
def test_what_keeps_a_worker_from_loading_is_told(tmp_path: Path):
    """Here rank 0 finds nothing wrong itself."""
    workers = Workers(EngineSettings(model=str(tmp_path), name="t", tensor_parallel=2))
    with workers._listener, workers._processes[0], pytest.raises(ModelError, match=r"There is no config\.json"):
        workers.join(torch.device("cpu"))
