"""Rows computed by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from yardstick_llm.kernels import row_chunks
from yardstick_llm.kernels.row_chunks import in_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 7, 100])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_each_row_is_computed_once_by_threads_that_share_no_operation(
    rows: int, mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_chunks, "THREAD_ELEMENTS", 10)
    seen: list[tuple[slice, int, bool, bool]] = []

    def work(span: slice) -> None:
        seen.append((span, torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with mode():
        expected = 1, torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        in_threads(work, rows, 4)
    assert sorted(row for span, *_ in seen for row in range(rows)[span]) == [*range(rows)]
    assert all(len(range(rows)[span]) * 4 <= 10 for span, *_ in seen)
    assert {each[1:] for each in seen} <= {expected}
    assert torch.get_num_threads() == 3


def test_all_threads_work_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "THREAD_ELEMENTS", 10)
    met = threading.Barrier(3, timeout=30)

    def work(_: slice) -> None:
        met.wait()

    in_threads(work, 3, 10)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_thread_raises_is_raised_when_all_have_ended(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "THREAD_ELEMENTS", 10)
    met, done = threading.Barrier(3, timeout=30), []

    def work(span: slice) -> None:
        met.wait()
        if span.start == failing:
            raise ZeroDivisionError
        done.append(span.start)

    with pytest.raises(ZeroDivisionError):
        in_threads(work, 3, 10)
    assert len(done) == 2
    assert torch.get_num_threads() == 3
