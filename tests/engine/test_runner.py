"""Launching a step never waits for the device: on a CPU, nothing between launch and settle looks at a tensor's values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import wire
from engine.loop.build import build_loop
from engine.models.transfer import Download
from engine.runner import sampling
from engine.runner.lenvm import draws as guided_draws
from engine.runner.runner import Runner
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine.device import Device
from tests.engine.lenvm.plain import make_lenvm_checkpoint


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every launch of a step under watch; the tokens of the launches seen."""
    launch, launches = Runner.launch, []

    def watched_launch(self, batch):
        launches.append(batch.tokens)
        with monkeypatch.context() as patch, Device(patch) as watch:
            for name in ("keep_thresholds", "seeded_draw"):
                patch.setattr(sampling, name, watch.kernel(getattr(sampling, name)))
            for name in ("candidates", "length_tilt"):
                patch.setattr(guided_draws, name, watch.kernel(getattr(guided_draws, name)))
            prepare = watch.kernel(sampling.prepare)  # on the host's own numbers
            for module in (sampling, guided_draws):
                patch.setattr(module, "prepare", prepare)
            return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", watched_launch)
    return launches


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def test_no_launch_waits(checkpoint: Path, watched: list[int], tmp_path: Path):
    length = make_lenvm_checkpoint(tmp_path, "qwen2")
    settings = {"max_total_tokens": 2048, "max_batched_tokens": 48, "overlap": True, "lenvm_model": str(length)}
    loop = build_loop(EngineSettings(model=str(checkpoint), name="t", **settings))
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
    loop.submit(wire.Score("s", list(range(3, 40)), [[7, 8], [9], [10, 11, 12]], wire.Labels([1, 2])))
    loop.submit(wire.Generate("greedy", [5, 6], wire.Sampling(max_tokens=6, temperature=0, ignore_eos=True), logprobs=3))
    loop.submit(wire.Generate("drawn", [5, 7], wire.Sampling(max_tokens=6, ignore_eos=True, n=2)))
    loop.submit(wire.Generate("all", [5, 8, 9], wire.Sampling(max_tokens=6, ignore_eos=True, **everything), logprobs=0))
    loop.submit(wire.Generate("top_p", [5, 8, 9], wire.Sampling(max_tokens=6, ignore_eos=True, top_p=0.8)))
    loop.submit(wire.Generate("echo", list(range(3, 90)), wire.Sampling(max_tokens=2), prompt_logprobs=2))
    loop.submit(wire.Score("values", list(range(3, 40)), [[7, 8], [9]], wire.LengthValue()))
    for place, mode in enumerate(({"mode": "exp", "scale": 2.0}, {"constraint": "eq_soft", "target_length": 3, "top_k": 9})):
        guidance = wire.LengthGuidance(return_values=True, entropy_threshold=0.5, **mode)
        sampling = wire.Sampling(max_tokens=6, n=2, **everything)
        loop.submit(wire.Generate(f"guided{place}", list(range(3, 60)), sampling, logprobs=3, length_guidance=guidance))
    replies = []
    while not loop.idle:
        replies += loop.step()
    assert len(watched) >= 6
    assert not [reply for reply in replies if isinstance(reply, wire.Failed)]


def test_on_a_gpu_a_step_without_results_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a long prompt has no results. If the host did not wait for it, a later step would fill buffers that copies to the
    device still read."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    download = Download(torch.device("cuda"))
    download.send()
    download.wait()
    assert calls == ["record", "synchronize"]
