"""Seeded draws: the kernel takes the very tokens of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import yardstick_llm.kernels.seeded_sampling
from yardstick_llm.kernels.runtime import jit, tl
from yardstick_llm.kernels.seeded_sampling import (
    _gumbel,
    gumbel,
    seeded_choice_reference,
    seeded_choice_triton,
    seeded_draw_reference,
    seeded_draw_triton,
)

Operation = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
BOTH = pytest.mark.parametrize("operation", [seeded_draw_reference, seeded_draw_triton], ids=["reference", "triton"])
CHOICES = pytest.mark.parametrize("choose", [seeded_choice_reference, seeded_choice_triton], ids=["reference", "triton"])
# Where infinities meet, NumPy, and so the interpreter, warns; a GPU does not.
INFINITIES = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def _keys(rows: int, device: torch.device) -> Tensor:
    """Return keys of both signs."""
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(rows)).to(device)


def test_noise(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also far in the tails: 60,000 samples reach from about -2.4 to 11."""
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    @jit()
    def noise(keys: tl.tensor, out: tl.tensor, VOCAB: tl.constexpr) -> None:
        ids = tl.arange(0, VOCAB)
        tl.store(out + tl.program_id(0) * VOCAB + ids, _gumbel(tl.load(keys + tl.program_id(0)), ids))

    keys = _keys(15, device)
    found = torch.empty(15, 4096, device=device)
    noise[(15,)](keys, found, 4096)
    expected = gumbel(keys, torch.arange(4096, device=device))
    assert expected.max() > 9
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(("rows", "vocab"), [(40, 50), (24, 128), (24, 1000), (0, 30), (3, 1)])
@pytest.mark.parametrize("filtered", [True, False])
def test_kernel_draws_as_the_reference(
    rows: int, vocab: int, filtered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yardstick_llm.kernels.seeded_sampling, "BLOCK", 256)  # several splits, the last one not full
    logits = torch.randn(rows, vocab, device=device) * 3
    temperatures = torch.tensor([1.0, 0.0, 0.5, 3.0], device=device)[torch.arange(rows) % 4]
    thresholds = torch.tensor([-2.0, -math.inf, -8.0], device=device)[torch.arange(rows) % 3] if filtered else None
    given = logits, temperatures, _keys(rows, device), thresholds
    found = seeded_draw_triton(*given)
    assert found.dtype == torch.int64
    assert torch.equal(found, seeded_draw_reference(*given))


@BOTH
def test_threshold_decides_what_can_be_drawn(operation: Operation, device: torch.device) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 3.0], device=device).expand(100, -1).contiguous()
    given = logits, torch.full((100,), 2.0, device=device), _keys(100, device)
    assert set(operation(*given, torch.full((100,), -0.5, device=device)).tolist()) == {1, 3}, "1 below the peak is 0.5 scaled"
    assert set(operation(*given, None).tolist()) == {0, 1, 2, 3}


@BOTH
def test_greedy_takes_the_lowest_of_equals(operation: Operation, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardstick_llm.kernels.seeded_sampling, "BLOCK", 16)
    logits = torch.zeros(2, 100, device=device)
    logits[0, [7, 40, 41, 99]] = 5.0
    logits[1, [96, 97]] = 5.0
    assert operation(logits, torch.zeros(2, device=device), _keys(2, device), None).tolist() == [7, 96]


@BOTH
@INFINITIES
@pytest.mark.parametrize(
    ("temperature", "threshold", "logit"),
    [(0.0, None, math.nan), (0.0, -1.0, -math.inf), (1.0, None, -math.inf), (1.0, -1.0, math.nan)],
)
def test_a_row_without_any_possible_token_gives_a_valid_id(
    operation: Operation, temperature: float, threshold: float | None, logit: float, device: torch.device
) -> None:
    thresholds = None if threshold is None else torch.tensor([threshold], device=device)
    drawn = operation(
        torch.full((1, 3), logit, device=device), torch.tensor([temperature], device=device), _keys(1, device), thresholds
    )
    assert drawn.item() in range(3)


@pytest.mark.parametrize(("rows", "width"), [(60, 8), (20, 64), (5, 1), (0, 8)])
def test_kernel_chooses_as_the_reference(rows: int, width: int, device: torch.device) -> None:
    """Among them candidates without a chance."""
    weights = torch.rand(rows, width, device=device) * (torch.arange(width, device=device) < width // 2 + 1)
    ids = torch.randint(0, 150_000, (rows, width), generator=torch.Generator().manual_seed(1)).to(device)
    given = weights / weights.sum(1, keepdim=True), ids, _keys(rows, device)
    found = seeded_choice_triton(*given)
    assert found.dtype == torch.int64
    assert torch.equal(found, seeded_choice_reference(*given))


@CHOICES
def test_a_choice_is_a_draw_of_the_vocabulary(choose: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device) -> None:
    """With the candidates' probabilities, where other tokens have none."""
    logits, keys = torch.full((100, 90), -math.inf, device=device), _keys(100, device)
    ids = torch.tensor([70, 3, 41, 8], device=device).expand(100, -1).contiguous()
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).expand(100, -1).contiguous()
    logits.scatter_(1, ids, p.log())
    drawn = seeded_draw_reference(logits, torch.ones(100, device=device), keys, None)
    assert torch.equal(ids.gather(1, choose(p, ids, keys)).squeeze(1), drawn)
    assert len(set(drawn.tolist())) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_full_size(rows: int, device: torch.device) -> None:
    logits = torch.randn(rows, 151936, device=device) * 3
    temperatures = torch.rand(rows, device=device) + 0.5
    thresholds = torch.full((rows,), -20.0, device=device)
    given = logits, temperatures, _keys(rows, device), thresholds
    assert torch.equal(seeded_draw_triton(*given), seeded_draw_reference(*given))
