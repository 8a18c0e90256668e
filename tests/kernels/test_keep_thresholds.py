"""Where filters cut: the kernel against the reference, and both against a plain sort in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import yardstick_llm.kernels.keep_thresholds
import yardstick_llm.kernels.largest
from yardstick_llm.kernels.keep_thresholds import keep_thresholds_reference, keep_thresholds_triton, scale

Operation = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BOTH = pytest.mark.parametrize("operation", [keep_thresholds_reference, keep_thresholds_triton], ids=["reference", "triton"])
# Where infinities meet, NumPy, and so the interpreter, warns; a GPU does not.
INFINITIES = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

CASES = [(0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (20, 0.8, 0.0), (9, 0.5, 0.1), (0, 1.0, 0.05)]
"""(top_k, top_p, min_p)"""


def _parameters(cases: list[tuple[int, float, float]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    top_k, top_p, min_p = zip(*cases, strict=True)
    floors = [math.log(p) if p else -math.inf for p in min_p]
    return torch.tensor(top_k, device=device), torch.tensor(top_p, device=device), torch.tensor(floors, device=device)


def _kept(
    operation: Operation, logits: Tensor, case: tuple[int, float, float], device: torch.device, temperature: float = 1.0
) -> set[int]:
    """Ids that the threshold of a single row keeps."""
    temperatures = torch.tensor([temperature], device=device)
    row = logits.to(device).unsqueeze(0)
    return set(
        (scale(row, temperatures) >= operation(row, temperatures, *_parameters([case], device)))[0].nonzero().flatten().tolist()
    )


def _sorted_kept(logits: Tensor, case: tuple[int, float, float], temperature: float) -> set[int]:
    """The definition, for logits that all differ."""
    top_k, top_p, min_p = case
    order = logits.argsort(descending=True)[: top_k or None]
    p = (logits.double()[order] / temperature).softmax(0)
    within = p.cumsum(0) - p < (top_p if top_p < 1 else math.inf)  # a sum that is rounded reaches 1 before the last token
    kept = within & (p >= p[0] * min_p)
    return set(order[kept].tolist())


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_definition(
    operation: Operation, case: tuple[int, float, float], temperature: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (yardstick_llm.kernels.keep_thresholds, yardstick_llm.kernels.largest):  # several blocks, the last one not full
        monkeypatch.setattr(module, "BLOCK", 64)
    logits = torch.randn(150, generator=torch.Generator().manual_seed(3)) * 3
    assert _kept(operation, logits, case, device, temperature) == _sorted_kept(logits, case, temperature)


def test_kernel_is_the_reference_on_every_row(device: torch.device) -> None:
    logits = torch.randn(len(CASES), 500, device=device) * 2
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.3], device=device).repeat(len(CASES) // 4)
    parameters = _parameters(CASES, device)
    assert torch.equal(
        keep_thresholds_triton(logits, temperatures, *parameters), keep_thresholds_reference(logits, temperatures, *parameters)
    )


PATHS = [(64, 1.0), (64, 0.7), (5, 0.5), (65, 1.0), (65, 0.6), (0, 0.1), (0, 0.5), (0, 0.9), (0, 0.99), (0, 0.99999)]
"""(top_k, top_p): of ranked tokens, of the whole row, and of a bracket."""


@pytest.mark.slow
@INFINITIES
@pytest.mark.parametrize(("flatness", "room"), [(0.01, 5), (4.0, yardstick_llm.kernels.keep_thresholds.ROOM), (30.0, 5)])
def test_each_path_finds_the_threshold_of_the_reference(
    flatness: float, room: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where collected tokens have no room, splits have few probable tokens, and some have none that is allowed."""
    monkeypatch.setattr(yardstick_llm.kernels.keep_thresholds, "ROOM", room)
    monkeypatch.setattr(yardstick_llm.kernels.largest, "BLOCK", 64)
    generator = torch.Generator().manual_seed(int(100 * flatness))
    logits = torch.randn(len(PATHS), 300, generator=generator) * flatness
    logits[:, 64:128] -= 8.0
    logits[:, 192:256] = -math.inf
    logits = logits.to(device)
    parameters = _parameters([(top_k, top_p, 0.0) for top_k, top_p in PATHS], device)
    for temperature in (1.0, 0.05):
        temperatures = torch.full((len(PATHS),), temperature, device=device)
        found = keep_thresholds_triton(logits, temperatures, *parameters)
        assert torch.equal(found, keep_thresholds_reference(logits, temperatures, *parameters)), temperature


def test_small_cuts_read_the_row_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k up to 64 and a nucleus with room for its bracket need no search of the whole row."""
    launched: list[tuple[int, ...]] = []

    class Unused:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launched.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(yardstick_llm.kernels.keep_thresholds, "_search", Unused())
    cases = [(20, 1.0, 0.0), (20, 0.8, 0.0), (0, 0.9, 0.0), (0, 0.5, 0.1)]
    logits, temperatures = torch.randn(len(cases), 500, device=device) * 2, torch.ones(len(cases), device=device)
    found = keep_thresholds_triton(logits, temperatures, *_parameters(cases, device))
    assert torch.equal(found, keep_thresholds_reference(logits, temperatures, *_parameters(cases, device)))
    assert launched == [(len(cases),)]


@BOTH
def test_equals_of_the_last_are_kept(operation: Operation, device: torch.device) -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0, 1.0])
    assert _kept(operation, logits, (2, 1.0, 0.0), device) == {0, 1, 2, 4}
    assert _kept(operation, logits, (0, 0.5, 0.0), device) == {0, 1, 2, 4}
    # Of the equals only one counts to top-k's two: 0.73 of them is rank 0.
    assert _kept(operation, logits, (2, 0.72, 0.0), device) == {0}
    assert _kept(operation, logits, (2, 0.74, 0.0), device) == {0, 1, 2, 4}


@BOTH
def test_excluded_tokens_stay_out(operation: Operation, device: torch.device) -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 0.0])
    assert _kept(operation, logits, (2, 1.0, 0.0), device) == {1, 3}
    assert _kept(operation, logits, (0, 0.99, 0.0), device) == {1, 3}


@pytest.mark.gpu
@pytest.mark.parametrize("flatness", [0.01, 3.0])
def test_full_size(flatness: float, device: torch.device) -> None:
    logits = torch.randn(len(CASES), 151936, device=device) * flatness
    temperatures = torch.ones(len(CASES), device=device)
    parameters = _parameters(CASES, device)
    found = keep_thresholds_triton(logits, temperatures, *parameters)
    expected = keep_thresholds_reference(logits, temperatures, *parameters)
    # Sums in another order may move a cut past a token whose probability is within their rounding.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
