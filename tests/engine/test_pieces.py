"""Large steps captured in pieces, with attention launched between them, against steps that are launched whole.

On a CPU a stand-in records the work; tests marked ``gpu`` capture it in CUDA graphs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from engine.attention.reference import ReferenceAttention
from engine.device.cuda_graphs import CudaCapture
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.runner.pieces import SIZES, StepPieces
from tests.checkpoints import make_checkpoint
from tests.engine.recording import Recorder
from tests.engine.test_graphs import SHAPES, a_segment, cache, inputs, mixed_steps

STEPS = (4, 12, 16)


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Decoder:
    directory = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **SHAPES[request.param])
    return load_model(directory).to(device)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Recorder | CudaCapture:
    return CudaCapture(device) if device.type == "cuda" else Recorder(monkeypatch)


def attention_of(decoder: Decoder) -> ReferenceAttention:
    return ReferenceAttention(cache(decoder), decoder.config.num_heads, decoder.config.attention_specs)


@torch.inference_mode()
def test_pieces_give_what_launched_steps_give(decoder: Decoder, capture: Recorder | CudaCapture) -> None:
    ours, theirs = attention_of(decoder), attention_of(decoder)
    pieces = StepPieces(decoder, ours, capture, STEPS, above=0)
    slots = slice(ours.kv.padding_slot)
    for _ in range(2):  # the second time, padding holds other tokens
        for seed, segments in enumerate(mixed_steps()):
            tokens, positions = inputs(segments, seed, ours.kv.keys.device)
            found = pieces.forward(tokens, positions, segments)
            assert found is not None
            expected = decoder(tokens, positions, theirs.plan(segments))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            for kept, wanted in ((ours.kv.keys, theirs.kv.keys), (ours.kv.values, theirs.kv.values)):
                torch.testing.assert_close(kept[:, slots], wanted[:, slots], atol=1e-4, rtol=1e-4)
    assert pieces.replayed == 10


def test_small_and_too_large_steps_are_left_to_others(decoder: Decoder, capture: Recorder | CudaCapture) -> None:
    attention = attention_of(decoder)
    pieces = StepPieces(decoder, attention, capture, STEPS, above=4)
    for count in (1, 4, 17):
        segments = [a_segment(np.arange(count, dtype=np.int32), count)]
        assert pieces.forward(*inputs(segments, 0, attention.kv.keys.device), segments) is None
    assert pieces.replayed == 0


def test_padding_is_bounded() -> None:
    assert all(large <= 1.26 * small for small, large in itertools.pairwise(SIZES))
