"""Measures a kernel's time on this GPU and its share of the GPU's peak, both in the same run.

A benchmark is a function ``(gpu: Gpu) -> Iterator[Row]``: one of those in ``benchmarks/kernels/operations.py``, or in a module of
its own that ``benchmarks/kernels/cli.py`` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.engine.records import Store

REPEATS = 30
WARM_UPS = 3  # the first one compiles
FLUSHED_BYTES = 256 << 20  # several times the level-2 cache, so no run finds its inputs there
COPIED_BYTES = 2 << 30
PRODUCT_SIZE = 8192
AHEAD_CYCLES = 40_000_000
"""About 20 ms, in which the host queues all runs. A flush of the cache takes 90 µs on an H100, and launching a kernel up to 40."""
ROW_SECONDS = 5.0
"""Time that a measurement must have left to begin: kernels are compiled in it."""


class NoGpuError(RuntimeError):
    """There is no GPU to measure on."""


class NoTimeError(RuntimeError):
    """A measurement was left out, because the time of the run is over."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    shape: str
    seconds: float
    """The median of :data:`REPEATS` runs."""
    rate: float
    unit: str
    """Unit of the rate: GB/s or TFLOP/s, counting only what the operation must move or compute."""
    percent: float
    """Percentage of the peak measured in the same run."""


@dataclass(frozen=True)
class Gpu:
    """The GPU and its measured peaks."""

    name: str
    bandwidth: float
    """Bytes a second, read and written, of a large copy."""
    flops: float
    """Floating-point operations a second of a large bfloat16 product."""
    store: Store = field(default_factory=Store)
    """Store of the rows: each is on disk once it is measured, and is not measured again by a run that continues."""

    @classmethod
    def measured(cls, store: Store) -> Gpu:
        """Measure the peaks of this machine's GPU, unless ``store`` has them. Raises NoGpuError without a GPU, and NoTimeError."""
        if not torch.cuda.is_available():
            raise NoGpuError("The benchmarks of the kernels need an NVIDIA GPU, and torch finds none on this machine.")
        return cls(**_in_time(store, "GPU", cls._peaks), store=store)

    @staticmethod
    def _peaks() -> dict[str, Any]:
        return {"name": torch.cuda.get_device_name(), "bandwidth": _bandwidth(), "flops": _flops()}

    @staticmethod
    def works() -> bool:
        """Whether this process can still compute on the GPU."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def moved(self, name: str, shape: str, bytes_moved: float, run: Callable[[], Any]) -> Row:
        """Time ``run``, which must read and write ``bytes_moved`` bytes of memory. Raises NoTimeError."""
        return self._row(name, shape, bytes_moved, "GB/s", self.bandwidth, run)

    def computed(self, name: str, shape: str, operations: float, run: Callable[[], Any]) -> Row:
        """Time ``run``, which must compute ``operations`` floating-point operations. Raises NoTimeError."""
        return self._row(name, shape, operations, "TFLOP/s", self.flops, run)

    def _row(self, name: str, shape: str, work: float, unit: str, peak: float, run: Callable[[], Any]) -> Row:
        def measure() -> dict[str, Any]:
            taken = seconds(run)
            rate = work / taken
            return asdict(Row(name, shape, taken, rate / UNITS[unit], unit, 100 * rate / peak))

        return Row(**_in_time(self.store, f"{name}: {shape}", measure))


UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}


def _in_time(store: Store, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] | None = store.measure(key, ROW_SECONDS, measure)
    if found is None:
        raise NoTimeError(key)
    return found


def _bandwidth() -> float:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source))


def _flops() -> float:
    # Random numbers, because a product of zeros draws less power and runs faster than a real one.
    a, b = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").bfloat16()
    return 2 * PRODUCT_SIZE**3 / seconds(lambda: a @ b)


def seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median time of ``run`` on the GPU with a cold level-2 cache.

    All runs are queued at once, each behind a flush of the cache, so that the GPU never waits for Python.
    """
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UPS):
        run()
    marks = [(mark(), mark()) for _ in range(repeats)]
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    for start, end in marks:
        flushed.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(float(start.elapsed_time(end)) for start, end in marks) / 1e3


def mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def table(rows: list[Row]) -> str:
    """Return the rows as text, in columns."""
    head = ("operation", "shape", "µs", "rate", "of peak")
    cells = [
        (row.name, row.shape, f"{row.seconds * 1e6:.1f}", f"{row.rate:.4g} {row.unit}", f"{row.percent:.0f} %") for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (head, *cells))
