"""Launching a step never waits for the device: on a CPU, nothing between launch and settle looks at a tensor's values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import wire
from engine.build import build_loop
from engine.runner.runner import Runner
from engine.runner.transfer import Download, Upload
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2"}
"""Operators whose result depends on values in such a way that a host must wait for its device."""
LOOKS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Ways to look at values without an operator."""


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and isinstance(args[1], list | tuple) and any(map(_is_mask, args[1]))
        assert name not in WAITS, f"{func} waits for the device"
        assert not by_mask, f"{func} waits for the device to count a mask"
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every launch of a step under watch; the number of launches seen."""
    launch, launches = Runner.launch, []

    def look(*_):
        raise AssertionError("the host looked at a tensor's values")

    def watched_launch(self, batch):
        launches.append(batch.tokens)
        with monkeypatch.context() as patch, NoWaiting():
            for name in LOOKS:
                patch.setattr(torch.Tensor, name, look)
            return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", watched_launch)
    return launches


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def test_no_launch_waits(checkpoint: Path, watched: list[int]):
    loop = build_loop(EngineSettings(model=str(checkpoint), name="t", max_tokens_in_cache=2048, token_budget=48, overlap=True))
    everything = {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0},
        "min_tokens": 2,
    }
    loop.submit(wire.Score("s", list(range(3, 40)), [[7, 8], [9], [10, 11, 12]], [1, 2]))
    loop.submit(wire.Generate("greedy", [5, 6], wire.Sampling(max_tokens=6, temperature=0, ignore_eos=True), logprobs=3))
    loop.submit(wire.Generate("drawn", [5, 7], wire.Sampling(max_tokens=6, ignore_eos=True, n=2)))
    loop.submit(wire.Generate("all", [5, 8, 9], wire.Sampling(max_tokens=6, ignore_eos=True, **everything), logprobs=0))
    loop.submit(wire.Generate("top_p", [5, 8, 9], wire.Sampling(max_tokens=6, ignore_eos=True, top_p=0.8)))
    loop.submit(wire.Generate("echo", list(range(3, 90)), wire.Sampling(max_tokens=2), prompt_logprobs=2))
    replies = []
    while not loop.idle:
        replies += loop.step()
    assert len(watched) >= 6
    assert not [reply for reply in replies if isinstance(reply, wire.Failed)]


def test_the_watch_sees_what_it_should(watched: list[int]):
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.arange(3)[torch.tensor([True, False, True])]
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.arange(3).sum().item()


def test_uploads_and_downloads_bring_back_what_they_took():
    upload = Upload()
    places = [upload.add([3, 1]), upload.add([]), upload.add([[4, 5], [6, 7]])]
    sent = upload.send(torch.device("cpu"))
    assert [sent[place].tolist() for place in places] == [[3, 1], [], [4, 5, 6, 7]]
    tensors = [torch.randn(2, 3), torch.tensor([5, 1 << 20]), torch.empty(0, 4)]
    for before, after in zip(tensors, Download(tensors).wait(), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert torch.equal(before, after)
    assert Download([]).wait() == []
