"""The device of the engine, above all where a GPU is asked for and none can be used."""

from __future__ import annotations

import pytest
import torch

from engine.models.files import ModelError
from engine.runner import machine as placement
from engine.runner.machine import device_of
from engine.settings import EngineSettings


def settings(**given: object) -> EngineSettings:
    return EngineSettings(model="m", name="m", **given)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A build of torch for GPUs, on a machine with two that work."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placement.torch, "zeros", lambda *shape, device: None)
    return monkeypatch


def refusal(**given: object) -> str:
    with pytest.raises(ModelError) as error:
        device_of(settings(**given))
    return str(error.value)


def test_a_gpu_is_taken_where_there_is_one(cuda: pytest.MonkeyPatch) -> None:
    assert device_of(settings()) == torch.device("cuda", 0)
    assert device_of(settings(tensor_parallel=2), 1) == torch.device("cuda", 1)
    assert device_of(settings(device="cpu")) == torch.device("cpu")


def test_without_one_the_cpu_serves_unless_a_gpu_is_asked_for(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(settings()) == torch.device("cpu")
    assert "torch finds no GPU; check that nvidia-smi lists one here" in refusal(device="cuda")


def test_what_is_wrong_is_said(cuda: pytest.MonkeyPatch) -> None:
    def broken(*shape: int, device: torch.device) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nPlease update")

    assert "4 are needed and 2 found; lower --tensor-parallel" in refusal(tensor_parallel=4)
    cuda.setattr(placement.torch, "zeros", broken)
    assert refusal(device="cuda") == (
        "The engine cannot compute on the GPU: cuda:0 does not work: The NVIDIA driver on your system is too old; "
        "check the driver with nvidia-smi, or take --device cpu."
    )
    assert "cuda:0 does not work" in refusal()
    cuda.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "is built without CUDA; install a build with CUDA" in refusal(device="cuda")
