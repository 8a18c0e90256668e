"""The functions of readouts that compute in parts."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.modules import TokenHead
from yardstick_llm.engine.runner.readouts.draws import next_token_logprobs
from yardstick_llm.engine.runner.readouts.scores import label_logits, token_likelihoods
from yardstick_llm.kernels.soft_cap import NO_CAP


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")).requires_grad_(False)


def log_softmax(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden @ decoder.head_weight.T).double().log_softmax(-1)


def test_next_token_logprobs_in_parts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.engine.runner.readouts.draws.CHUNK_ELEMENTS", 3 * VOCAB_SIZE)
    hidden, tokens = torch.randn(10, 64), torch.arange(10)
    expected = log_softmax(decoder, hidden).float()
    chosen, ids, top = next_token_logprobs(decoder.token_head, hidden, tokens, 2)
    torch.testing.assert_close(chosen, expected[tokens, tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.gather(1, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.topk(2).values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("elements", [1, 3 * 64, 1 << 20])
def test_logits_of_each_rows_own_labels_in_chunks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr("yardstick_llm.kernels.row_chunks.CPU_CHUNK_ELEMENTS", elements)
    hidden, tokens = torch.randn(7, 64), torch.tensor([0, 5, 7, 300])
    columns = torch.randint(0, 4, (7, 6))
    expected = (hidden.double() @ decoder.head_weight.double().T).gather(1, tokens[columns])
    torch.testing.assert_close(label_logits(hidden, decoder.head_weight, tokens, columns), expected.float(), atol=1e-5, rtol=0)


def test_logits_are_summed_in_float32(decoder: Decoder) -> None:
    hidden, head = torch.randn(5, 64).bfloat16(), decoder.head_weight.bfloat16()
    columns = torch.zeros(5, 1, dtype=torch.int64)
    found = label_logits(hidden, head, torch.tensor([9]), columns)
    torch.testing.assert_close(found, hidden.float() @ head[9:10].float().T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 1000])
def test_likelihoods_of_some_rows_in_chunks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int) -> None:
    monkeypatch.setattr("yardstick_llm.engine.runner.readouts.scores.CHUNK_ELEMENTS", rows_at_a_time * VOCAB_SIZE)
    hidden, rows = torch.randn(20, 64), torch.tensor([3, 4, 5, 11, 12, 19, 0])
    expected = log_softmax(decoder, hidden)[rows].float()
    targets = expected.argmin(1)
    targets[2] = expected[2].argmax()
    found = token_likelihoods(decoder.token_head, hidden[rows], targets)
    torch.testing.assert_close(found[:, 0], expected.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    assert found[:, 1].tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_a_tie_counts_as_greedy() -> None:
    head = TokenHead(torch.eye(3), torch.eye(3), 1.0, NO_CAP)  # whose logits are the hidden rows
    targets = torch.arange(3)
    found = token_likelihoods(head, torch.tensor([[2.0, 2.0, 1.0]] * 3), targets)
    assert found[:, 1].tolist() == [1, 1, 0]
