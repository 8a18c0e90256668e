"""The two statistics of the evaluation, against their definitions."""

from __future__ import annotations

import pytest
import torch

from examples.demo_models.evaluate import auc, spearman


def test_auc_counts_pairs_in_the_right_order_and_half_of_the_ties() -> None:
    assert auc(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_spearman_sees_order_only() -> None:
    x = torch.tensor([0.1, 0.7, 0.2, 0.9])
    assert spearman(x, x.exp()) == pytest.approx(1.0)
    assert spearman(x, -x) == pytest.approx(-1.0)


def test_spearman_gives_ties_their_mean_rank() -> None:
    x, y = torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    ranks = torch.tensor([[1.5, 1.5, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    assert spearman(x, y) == pytest.approx(torch.corrcoef(ranks)[0, 1].item())
