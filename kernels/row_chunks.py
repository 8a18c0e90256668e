"""Work on a bounded number of rows at a time, where temporaries are several times as large as their input; on a CPU in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Elements computed at a time: 64 MiB of float32. Smaller chunks of logits would read the head's weights more often."""
CPU_CHUNK_ELEMENTS = 1 << 18
"""Elements computed at a time on a CPU. This many fit its caches: a third of the time for noise of 2^22 (one core)."""
THREAD_ELEMENTS = 1 << 18
"""Elements of a chain of operations on rows that a thread computes at a time on a CPU: 1 MiB of float32, so that each operation
finds in the caches of the core what the one before left there. Fewer are not worth a second thread."""


def row_chunks(rows: Tensor, width: int = 0) -> tuple[Tensor, ...]:
    """``rows`` cut along the first axis so that a part has at most the elements of a chunk; width: of a row, 0: its last axis."""
    limit = CPU_CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS
    return torch.split(rows, max(1, limit // (width or rows.shape[-1])))


def in_threads(work: Callable[[slice], None], rows: int, width: int) -> None:
    """Call ``work`` with slices of ``rows``, whose chain of operations has ``width`` elements a row, on all of torch's threads.

    Each thread computes its operations alone. If threads shared each operation, each would wait until the others wake: for GELU and
    quantisation of [8192, 1536], two threads took 31 ms in that way, 0.94 cores busy, and 12 in this (AMD EPYC, Zen 5). More
    threads were not measured; Python's lock lets only one of them start an operation at a time.
    """
    size, threads = max(1, THREAD_ELEMENTS // width), torch.get_num_threads()
    if rows > size:
        size = min(size, -(-rows // threads))
    share(work, [slice(start, start + size) for start in range(0, rows, size)])


def share(work: Callable[[slice], None], parts: Sequence[slice], threads: int | None = None) -> None:
    """Call ``work`` with each of the ``parts``. Each of the ``threads``, by default all of torch's, takes the next part."""
    left, of_torch = iter(parts), torch.get_num_threads()
    threads = of_torch if threads is None else threads
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def compute() -> None:
        for part in left:
            work(part)

    def assist() -> None:
        with torch.inference_mode() if inference else torch.set_grad_enabled(grad):
            compute()

    if threads == 1:
        return compute()
    helpers = _helpers(threads - 1)
    torch.set_num_threads(1)
    try:
        others = [helpers.submit(assist) for _ in range(min(threads, len(parts)) - 1)]
        try:
            compute()
        finally:
            for other in others:
                other.result()
    finally:
        torch.set_num_threads(of_torch)


@cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "rows", _compute_alone)


def _compute_alone() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # or the first operation of the thread would take the number that another thread has set last
