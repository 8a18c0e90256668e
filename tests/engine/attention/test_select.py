"""Which backend is taken where, what is logged of it, and what is said where it cannot be."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.engine.attention.test_flashinfer import config
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner.attention import flashinfer, triton
from yardstick_llm.engine.runner.attention.flashinfer import FlashInferAttention
from yardstick_llm.engine.runner.attention.native import NativeAttention
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention
from yardstick_llm.engine.runner.attention.select import choose
from yardstick_llm.engine.runner.attention.triton import TritonAttention
from yardstick_llm.kernels.quantize import FP8

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF = torch.bfloat16


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with such a GPU and FlashInfer with its kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer.metadata, "version", lambda name: flashinfer.VERSION)
    monkeypatch.setattr(flashinfer, "compiled", lambda *_: True)
    return monkeypatch


def test_compiled_loops_on_a_cpu_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = choose("auto", CPU, config(), torch.float32)
    assert choice == (NativeAttention, "the model runs on the CPU", False)
    assert caplog.messages == ["attention: the native backend (the model runs on the CPU)"]
    assert choose("auto", CPU, config(), HALF).backend is ReferenceAttention
    assert choose("auto", CPU, config(), torch.float32, FP8).backend is ReferenceAttention
    assert choose("reference", CPU, config(), torch.float32).backend is ReferenceAttention


def test_flashinfer_where_it_is_whole(hopper: pytest.MonkeyPatch) -> None:
    assert choose("auto", GPU, config(), HALF).backend is FlashInferAttention
    assert choose("flashinfer", GPU, config(), HALF) == (FlashInferAttention, "asked for", False)
    assert choose("triton", GPU, config(), HALF) == (TritonAttention, "asked for", False)


def test_triton_where_flashinfer_is_not(hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert choose("auto", GPU, config(), torch.float32).reason == "not flashinfer: it computes in bfloat16 and float16 only"
    assert choose("auto", GPU, config(head_dim=32), HALF).reason == "not flashinfer: it has no kernel for heads of 32 elements"
    hopper.setattr(flashinfer.metadata, "version", lambda name: "0.5.0")
    with caplog.at_level(logging.WARNING):
        choice = choose("auto", GPU, config(), HALF)
    assert choice == (TritonAttention, "not flashinfer: flashinfer-python 0.6.6 is needed and 0.5.0 is installed", True)
    assert caplog.messages[-1] == f"attention: the triton backend ({choice.reason})"


def test_flashinfer_that_must_be_compiled_only_where_asked_for(hopper: pytest.MonkeyPatch) -> None:
    """A start takes minutes then."""
    hopper.setattr(flashinfer, "compiled", lambda *_: False)
    hopper.setattr(flashinfer, "_compiler", lambda: True)
    assert choose("auto", GPU, config(), HALF).backend is TritonAttention
    assert choose("flashinfer", GPU, config(), HALF).backend is FlashInferAttention
    hopper.setattr(flashinfer, "_compiler", lambda: False)
    with pytest.raises(ModelError, match="nvcc and ninja are not both here"):
        choose("flashinfer", GPU, config(), HALF)


def test_a_kernel_for_fp8_keys_and_values_is_one_of_its_own(hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The modules that are built beforehand have none."""
    hopper.setattr(flashinfer, "compiled", lambda head_dim, dtype, kept, specs: kept == dtype)
    hopper.setattr(flashinfer, "_compiler", lambda: True)
    assert choose("auto", GPU, config(), HALF).backend is FlashInferAttention
    with caplog.at_level(logging.WARNING):
        choice = choose("auto", GPU, config(), HALF, torch.float8_e4m3fn)
    assert choice == (TritonAttention, "not flashinfer: its kernel would have to be compiled first, for some minutes", True)
    assert caplog.messages[-1] == f"attention: the triton backend ({choice.reason})"


def test_flashinfer_that_is_not_whole(hopper: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> bool:
        raise ImportError("No module named 'tvm_ffi'")

    hopper.setattr(flashinfer, "compiled", missing)
    reason = choose("auto", GPU, config(), HALF).reason
    assert reason == "not flashinfer: flashinfer-python lacks something it imports: No module named 'tvm_ffi'"


def test_flashinfer_that_cannot_write(hopper: pytest.MonkeyPatch) -> None:
    """In a container whose volume is missing or read-only."""

    def refused(*_: object) -> bool:
        raise PermissionError(13, "Permission denied", "/models")

    hopper.setattr(flashinfer, "compiled", refused)
    choice = choose("auto", GPU, config(), HALF)
    assert choice.backend is TritonAttention
    assert choice.reason.endswith("cannot write its files below FLASHINFER_WORKSPACE_BASE: Permission denied")


def test_what_cannot_run(hopper: pytest.MonkeyPatch) -> None:
    def refused(name: str, device: torch.device, model: ModelConfig) -> str:
        with pytest.raises(ModelError) as error:
            choose(name, device, model, HALF)
        return str(error.value)

    hopper.setattr(triton, "INTERPRETED", False)
    assert refused("triton", CPU, config()) == (
        "The attention backend triton cannot serve this model here: it needs an NVIDIA GPU. Ask for 'auto' to take one that can."
    )
    assert "it needs an NVIDIA GPU" in refused("flashinfer", CPU, config())
    assert "it computes on the CPU only" in refused("reference", GPU, config())
    assert "it computes on the CPU only" in refused("native", GPU, config())
    assert "it computes in float32 only" in refused("native", CPU, config())
    assert "heads have 80 elements, and its kernel takes 16, 32" in refused("triton", GPU, config(head_dim=80))
    assert "more than 16 query heads a key head" in refused("triton", GPU, config(num_heads=34, num_kv_heads=2))
    assert refused("auto", GPU, config(head_dim=80)).endswith("Serve it on the CPU.")
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in refused("auto", GPU, config())


def test_flashinfer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise flashinfer.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer.metadata, "version", absent)
    assert flashinfer.problem(GPU, 128, HALF, HALF) == "flashinfer-python 0.6.6 is not installed"
