"""Candidate selection: the reference against a plain sort in float64, and the kernels against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import yardstick_llm.kernels.largest
from yardstick_llm.kernels.candidates import Candidates, candidates_reference, candidates_triton

Operation = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Candidates]
BOTH = pytest.mark.parametrize("operation", [candidates_reference, candidates_triton], ids=["reference", "triton"])


def _by_hand(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, width: int) -> list[tuple[int, float]]:
    """(id, probability) of each kept token, as the definition says, one by one."""
    logits = torch.tensor(row, dtype=torch.float64)
    p = (logits / temperature).softmax(0).tolist()
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))[: min(width, top_k)]
    kept, before = ranked[:1], p[ranked[0]]
    for token in ranked[1:]:
        if before <= top_p and p[token] >= p[ranked[0]] * min_p and p[token] > 0:
            kept.append(token)
        before += p[token]
    total = sum(p[token] for token in kept)
    return [(token, p[token] / total) for token in kept]


def _one(operation: Operation, row: list[float], device: torch.device, **changes: float) -> list[tuple[int, float]]:
    """The kept candidates of a single row."""
    given = {"temperature": 1.0, "top_k": 4, "top_p": 1.0, "min_p": 0.0} | changes
    columns = [torch.tensor([float(given[name])], device=device) for name in ("temperature", "top_p", "min_p")]
    top_k = torch.tensor([int(given["top_k"])], device=device)
    found = operation(torch.tensor([row], device=device), columns[0], top_k, columns[1], columns[2], 4)
    count = int(found.counts[0])
    assert (found.probabilities[0, count:] == 0).all()
    return list(zip(found.ids[0, :count].tolist(), found.probabilities[0, :count].tolist(), strict=True))


def _ids(kept: list[tuple[int, float]]) -> list[int]:
    return [token for token, _ in kept]


def _parameters(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameters of every kind, with different ones in each row."""
    generator = torch.Generator().manual_seed(rows)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1e-3])[torch.arange(rows) % 4]
    top_k = torch.randint(1, width + 1, (rows,), generator=generator)
    top_p = torch.tensor([1.0, 0.9, 0.5])[torch.arange(rows) % 3]
    min_p = torch.tensor([0.0, 0.05, 0.3, 0.01, 0.0])[torch.arange(rows) % 5]
    return temperatures.to(device), top_k.to(device), top_p.to(device), min_p.to(device)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(("rows", "vocab", "width"), [(7, 50, 8), (5, 300, 2), (4, 400, 64), (6, 64, 64)])
def test_definition(
    operation: Operation, rows: int, vocab: int, width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yardstick_llm.kernels.largest, "BLOCK", 128)  # several splits, the last one not full
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    parameters = _parameters(rows, width, device)
    found = operation(logits.to(device), *parameters, width)
    assert found.ids.dtype == found.counts.dtype == torch.int64
    for row, given in enumerate(zip(logits.tolist(), *(column.tolist() for column in parameters), strict=True)):
        expected = _by_hand(*given, width)
        assert int(found.counts[row]) == len(expected)
        assert found.ids[row, : len(expected)].tolist() == _ids(expected)
        padded = [p for _, p in expected] + [0.0] * (width - len(expected))
        torch.testing.assert_close(found.probabilities[row].tolist(), padded, atol=1e-6, rtol=1e-5)
        assert found.ids[row].tolist() == logits[row].topk(width).indices.tolist(), "ranked beyond those kept too"


@BOTH
def test_filters(operation: Operation, device: torch.device) -> None:
    row = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert _ids(_one(operation, row, device)) == [1, 3, 2, 0]
    assert _ids(_one(operation, row, device, top_k=2)) == [1, 3]
    assert _ids(_one(operation, row, device, top_p=0.35)) == [1]
    assert _ids(_one(operation, row, device, top_p=0.45)) == [1, 3]
    assert _ids(_one(operation, row, device, min_p=0.6)) == [1, 3]
    assert _ids(_one(operation, row, device, min_p=0.6, temperature=3.0)) == [1, 3, 2, 0]
    assert _ids(_one(operation, row, device, top_k=3, top_p=0.75, min_p=0.6)) == [1, 3], "the strictest filter decides"
    # 0.4 of 0.7 is 0.57 of what top-k keeps, but 0.4 of the whole: renormalised, rank 1 would go.
    assert _ids(_one(operation, row, device, top_k=2, top_p=0.5)) == [1, 3], "top-p sees the full vocabulary"
    assert _ids(_one(operation, [0.0] * 4, device, top_p=0.5)) == [0, 1, 2], "0.5 is before rank 2, and may equal top-p"
    torch.testing.assert_close([p for _, p in _one(operation, row, device, top_k=2)], [4 / 7, 3 / 7])
    assert _one(operation, [1.0, 3.0, 3.0, 2.0], device, temperature=0.0) == [(1, 1.0)]
    assert _one(operation, [1.0, 3.0, 2.999, 2.0], device, temperature=1e-45) == [(1, 1.0)]


@BOTH
def test_equals_by_lower_id(operation: Operation, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across splits, below zero, and for the two zeros."""
    monkeypatch.setattr(yardstick_llm.kernels.largest, "BLOCK", 32)
    for value in (3.0, -3.0, 0.0):
        row = [-9.0] * 100
        for token in (99, 70, 33, 32, 5, 64):
            row[token] = value
        assert _ids(_one(operation, row, device)) == [5, 32, 33, 64]
    assert _ids(_one(operation, [-1.0, -0.0, 0.0, -0.0, -5.0], device)) == [1, 2, 3, 0]


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, where infinities meet
def test_excluded_tokens_are_no_candidates(operation: Operation, device: torch.device) -> None:
    """A length constraint picks a candidate whatever its probability: it must never find an excluded one."""
    inf = float("inf")
    assert _ids(_one(operation, [-inf, 1.0, -inf, 0.0, -inf], device)) == [1, 3]
    assert _one(operation, [-inf] * 5, device) == [(0, 1.0)], "some valid id where all are excluded"
    assert _one(operation, [0.0, -1000.0, -1.0, -2000.0], device)[2:] == [], "nor has one whose probability is 0"


@BOTH
def test_no_rows(operation: Operation, device: torch.device) -> None:
    found = operation(torch.zeros(0, 40, device=device), *_parameters(0, 8, device), 8)
    assert [list(column.shape) for column in found] == [[0, 8], [0, 8], [0]]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4, 8, 64])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_full_size(rows: int, width: int, device: torch.device) -> None:
    logits = torch.randn(rows, 151936, device=device) * 3
    parameters = _parameters(rows, width, device)
    found, expected = candidates_triton(logits, *parameters, width), candidates_reference(logits, *parameters, width)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.counts, expected.counts)
    torch.testing.assert_close(found.probabilities, expected.probabilities, atol=1e-6, rtol=1e-4)


def test_arguments_are_checked(device: torch.device) -> None:
    logits, parameters = torch.zeros(3, 40, device=device), _parameters(3, 8, device)
    for width in (1, 3, 128, 64):
        for operation in (candidates_reference, candidates_triton):
            with pytest.raises(
                ValueError, match=f"width is {width}, where a power of two from 2 to 64, and at most the vocabulary's 40"
            ):
                operation(logits, *parameters, width)
    with pytest.raises(ValueError, match=r"logits is torch.float16, where torch.float32 is expected"):
        candidates_triton(logits.half(), *parameters, 8)
