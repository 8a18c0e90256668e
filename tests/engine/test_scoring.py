"""Label and prompt log-probabilities from hidden rows."""

from __future__ import annotations

import pytest
import torch

from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.readouts.labels import label_table
from engine.readouts.prompts import next_token_logprobs
from kernels.label_logprobs import label_logprobs
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=request.param)
    return load_model(directory).requires_grad_(False)


def log_softmax(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden @ decoder.head_weight.T).double().log_softmax(-1)


def test_each_row_has_its_own_labels(decoder: Decoder) -> None:
    hidden = torch.randn(4, 64)
    labels = [[5], [], [7, 7, VOCAB_SIZE - 1], [0, 3]]
    table = label_table(labels)
    assert table.tolist() == [[5, 0, 0], [0, 0, 0], [7, 7, VOCAB_SIZE - 1], [0, 3, 0]]
    expected = log_softmax(decoder, hidden)
    found = label_logprobs(hidden, decoder.head_weight, torch.from_numpy(table))
    for at, row in enumerate(labels):
        assert found[at, : len(row)].tolist() == pytest.approx(expected[at, row].tolist(), abs=1e-5)


def test_no_rows() -> None:
    assert label_table([]).shape == (0, 0)


def test_next_token_logprobs_in_parts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.readouts.prompts.CHUNK_ELEMENTS", 3 * VOCAB_SIZE)
    hidden, tokens = torch.randn(10, 64), torch.arange(10)
    expected = log_softmax(decoder, hidden).float()
    chosen, ids, top = next_token_logprobs(decoder, hidden, tokens, 2)
    torch.testing.assert_close(chosen, expected[tokens, tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.gather(1, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.topk(2).values, atol=1e-5, rtol=0)
