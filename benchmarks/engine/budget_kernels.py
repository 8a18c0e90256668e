"""Lines of the budget: the launches of one kernel in a step, for :mod:`benchmarks.engine.budget`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.h200 import BANDWIDTH, BF16, COPIES, PRODUCTS


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step."""

    name: str
    launches: int
    bytes: float
    flops: float = 0.0
    rate: float = PRODUCTS * BF16
    """Operations a second."""
    hidden: float = 0.0
    """Seconds of operations that run while the same launches move bytes of another line."""

    @property
    def seconds(self) -> float:
        """Predicted time, without the gaps between launches."""
        return max(self.flops / self.rate - self.hidden, self.bytes / (COPIES * BANDWIDTH))

    @property
    def limit(self) -> str:
        """Which of the two takes longer: bytes or operations."""
        return "bytes" if self.seconds == self.bytes / (COPIES * BANDWIDTH) else "operations"


def kernels_table(kernels: Sequence[Kernel], digits: int = 2) -> str:
    """Return a table with a line for each kernel and one for all. ``digits``: of operations."""
    lines = [
        "| kernel | launches | GB | TFLOP | limit | predicted ms | measured ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kernel in kernels:
        numbers = f"{kernel.bytes / 1e9:.2f} | {kernel.flops / 1e12:.{digits}f} | {kernel.limit} | {1000 * kernel.seconds:.2f}"
        lines.append(f"| {kernel.name} | {kernel.launches} | {numbers} | |")
    launches, moved, flops, seconds = (
        sum(values) for values in zip(*((each.launches, each.bytes, each.flops, each.seconds) for each in kernels), strict=True)
    )
    lines.append(f"| **all** | {launches} | {moved / 1e9:.2f} | {flops / 1e12:.{digits}f} | | **{1000 * seconds:.2f}** | |")
    return "\n".join(lines) + "\n"
