"""The largest logits of a row and their log-probabilities: the kernel against a stable sort in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import yardstick_llm.kernels.largest
from yardstick_llm.kernels.largest import token_logprobs_reference, token_logprobs_triton


def _sorted(logits: Tensor, chosen: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: equals by rising id."""
    logprobs = logits.double().log_softmax(-1)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_n]
    return logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).float(), ids, logprobs.gather(1, ids).float()


@pytest.mark.slow
@pytest.mark.parametrize(("top_n", "block"), [(0, 64), (1, 2048), (8, 64), (20, 2048), (32, 64)])
def test_definition(top_n: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal logits, in groups that are full, in part and alone: the large block has more than one group of groups."""
    monkeypatch.setattr(yardstick_llm.kernels.largest, "BLOCK", block)
    logits = (torch.randn(3, 2500, generator=torch.Generator().manual_seed(top_n)) * 3).round()
    logits[1, 40:] = -9.0
    chosen = torch.tensor([0, 2499, 77])
    found = token_logprobs_triton(logits.to(device), chosen.to(device), top_n)
    for name, values, expected in zip(found._fields, found, _sorted(logits, chosen, top_n), strict=True):
        torch.testing.assert_close(values.cpu(), expected, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_large_logits_and_excluded_ones(device: torch.device) -> None:
    logits = torch.tensor([[-math.inf, 3e38, -math.inf, -3e38, 3e38, 0.0]], device=device)
    found = token_logprobs_triton(logits, torch.tensor([4], device=device), 4)
    assert found.top_tokens.tolist() == [[1, 4, 5, 3]]
    assert found.top[0, :2].tolist() == pytest.approx([math.log(0.5)] * 2)
    assert (found.top[0, 2:] < -1e38).all()
    assert found.chosen.item() == pytest.approx(math.log(0.5))


def test_what_is_not_a_number_shows(device: torch.device) -> None:
    logits = torch.zeros(2, 50, device=device)
    logits[0, 7] = math.nan
    found = token_logprobs_triton(logits, torch.tensor([3, 3], device=device), 2)
    assert found.chosen[0].isnan()
    assert found.top_tokens[0, 0] == 7
    assert found.top_tokens[1].tolist() == [0, 1]


def test_no_rows(device: torch.device) -> None:
    for operation in (token_logprobs_reference, token_logprobs_triton)[device.type == "cpu" :]:
        found = operation(torch.zeros(0, 40, device=device), torch.zeros(0, dtype=torch.int64, device=device), 3)
        assert [list(column.shape) for column in found] == [[0], [0, 3], [0, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("top_n", [5, 20])
@pytest.mark.parametrize("rows", [1, 300])
def test_full_size(rows: int, top_n: int, device: torch.device) -> None:
    logits, chosen = torch.randn(rows, 151936, device=device) * 3, torch.arange(rows, device=device)
    found = token_logprobs_triton(logits, chosen, top_n)
    for values, expected in zip(found, _sorted(logits, chosen, top_n), strict=True):
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


def test_arguments_are_checked(device: torch.device) -> None:
    logits, chosen = torch.zeros(3, 100, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="top_n is 33, where at most 32, and the vocabulary's 100, is expected"):
        token_logprobs_triton(logits, chosen, 33)
    with pytest.raises(ValueError, match=r"logits is torch.float16, where torch.float32 is expected"):
        token_logprobs_triton(logits.half(), chosen, 5)
