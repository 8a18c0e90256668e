"""Batched sampling walks rows of different prompts in step; each must come out as if it were alone."""

from __future__ import annotations

import pytest
import torch

from engine.models.decoder import Decoder
from examples.demo_models.forward import causal_hidden
from examples.demo_models.generate import generate
from examples.demo_models.shapes import base_config, initialise

EOS = 3


def make_decoder() -> Decoder:
    """Small, random and sharp: almost all probability on one token, so that sampling is greedy."""
    config = base_config(40, EOS)
    decoder = Decoder(config)
    initialise(decoder, config.num_layers, 7)
    with torch.no_grad():
        decoder.norm.weight.fill_(3000.0)
    return decoder.eval()


@torch.inference_mode()
def greedy_alone(decoder: Decoder, prompt: list[int], limit: int) -> list[int]:
    output: list[int] = []
    while len(output) < limit and EOS not in output:
        hidden = causal_hidden(decoder, torch.tensor([prompt + output]))
        output.append(int(decoder.logits(hidden[0, -1]).argmax()))
    return output


@pytest.mark.slow
def test_rows_do_not_see_each_other() -> None:
    decoder = make_decoder()
    prompts = [[5], [9, 8, 7], [30, 31, 32, 33, 34, 35, 36], [9, 8]]
    outputs = generate(decoder, prompts, seed=0, limit=40, rows=3)
    assert outputs == [greedy_alone(decoder, prompt, 40) for prompt in prompts]
    assert len({tuple(output) for output in outputs}) > 1


def test_sampling_is_a_function_of_the_seed_and_ends_at_the_end_token() -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.norm.weight.fill_(1.0)
    first, again, other = (generate(decoder, [[5, 6]] * 30, seed=seed, limit=25) for seed in (1, 1, 2))
    assert first == again != other
    assert all(EOS not in output[:-1] for output in first)
    assert any(output[-1] == EOS and len(output) < 25 for output in first)
    assert all(len(output) == 25 or output[-1] == EOS for output in first)
