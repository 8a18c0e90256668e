"""A mixture of experts in a captured step: nothing waits for the device, and a replay routes the rows that it finds.

On a late device whatever waits for a result is an error, and the shapes of the recorded work are those of the capture.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from engine.models.config import load_config
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.models.modules import Experts
from engine.runner.distributed.shard import part_of
from tests.checkpoints import make_checkpoint
from tests.engine.late import LateGpu, LateTensor, computing

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


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_a_replay_routes_what_it_finds(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(load_model(make_checkpoint(tmp_path, family)).layers[0].mlp, monkeypatch, 1e-5)


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
