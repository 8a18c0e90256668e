"""Small steps on one thread, and large ones on several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import wire
from engine.loop.build import build_loop
from engine.loop.loop import Loop
from engine.models.config import load_config
from engine.models.decoder import Decoder
from engine.runner import machine as module
from engine.runner.machine import MOST_PRODUCTS, StepThreads, step_threads
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine.lenvm.plain import GAMMA, make_lenvm_checkpoint
from tests.engine.lenvm.writing import guidance, guided
from tests.engine.test_loop import run, tokens_of

CPU = torch.device("cpu")
THREADS = 2
SCORE = wire.Score("s", list(range(3, 40)), [[7, 8], [9]], wire.Labels([1, 2]))
GREEDY = wire.Generate("g", [5, 6, 7], wire.Sampling(max_tokens=4, temperature=0, ignore_eos=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, int]]:
    """Tokens of each pass of the decoder, whether it is on the calling thread, and the threads of its operations."""
    computed, forward, caller = [], Decoder.forward, threading.get_ident()

    def watched(self, tokens, *others):
        computed.append((len(tokens), threading.get_ident() == caller, torch.get_num_threads()))
        return forward(self, tokens, *others)

    monkeypatch.setattr(Decoder, "forward", watched)
    return computed


def build(checkpoint: Path, threads: int = THREADS, **settings: Any) -> Loop:
    return build_loop(EngineSettings(model=str(checkpoint), name="t", threads=threads, max_total_tokens=512, **settings))


@pytest.fixture
def small_and_large(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to 30 tokens are small."""
    config = load_config(checkpoint)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 30 * config.hidden_size * config.vocab_size)  # the head is larger than a layer


@pytest.mark.usefixtures("small_and_large")
def test_small_steps_use_one_thread(checkpoint: Path, computed: list[tuple[int, bool, int]]) -> None:
    loop = build(checkpoint)
    computed.clear()
    found = run(loop, SCORE), tokens_of(run(loop, GREEDY), "g")
    assert computed == [(40, False, THREADS), (3, True, 1), *[(1, True, 1)] * 3]
    alone = build(checkpoint, threads=1)
    (scored,), (expected,) = found[0], run(alone, SCORE)
    torch.testing.assert_close(torch.tensor(scored.rows), torch.tensor(expected.rows))
    assert found[1] == tokens_of(run(alone, GREEDY), "g")


def test_a_length_model_that_is_larger_than_the_model(
    tmp_path: Path, checkpoint: Path, computed: list[tuple[int, bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is small only if the length model could compute all its tokens on one thread."""
    length = make_lenvm_checkpoint(tmp_path, "qwen3", intermediate_size=2048, num_hidden_layers=1)
    config = load_config(length)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 30 * config.hidden_size * 4 * config.intermediate_size)
    loop = build(checkpoint, lenvm_model=str(length), lenvm_gamma=GAMMA)
    computed.clear()
    run(loop, GREEDY)
    assert computed == [(3, True, 1), *[(1, True, 1)] * 3]
    computed.clear()
    run(loop, SCORE)
    assert computed == [(40, False, THREADS)]
    computed.clear()
    run(loop, guided("v", list(range(3, 60)), guidance(scale=3.0), max_tokens=1))
    assert {threads for _, _, threads in computed} == {THREADS}
    monkeypatch.setattr(module, "MOST_PRODUCTS", config.hidden_size * config.intermediate_size)
    torch.set_num_threads(THREADS)
    build(checkpoint, lenvm_model=str(length), lenvm_gamma=GAMMA)
    assert torch.get_num_threads() == THREADS, "even one token of the length model is a large step"


def test_models_of_which_all_steps_are_shared(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    large = replace(config, vocab_size=MOST_PRODUCTS // config.hidden_size + 1)
    assert step_threads(large, CPU) is None
    assert step_threads(replace(config, intermediate_size=MOST_PRODUCTS), CPU) is None
    assert step_threads(config, torch.device("cuda")) is None
    assert torch.get_num_threads() == THREADS
    assert isinstance(step_threads(replace(large, lm_head=False), CPU), StepThreads)
    assert torch.get_num_threads() == 1
    assert step_threads(config, CPU) is None
