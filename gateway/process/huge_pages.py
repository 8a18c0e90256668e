"""Transparent huge pages for the memory that the process keeps, on Linux 6.1 or newer.

A request touches objects all over the heap, so in pages of 4 KiB it misses the TLB often. ``madvise(MADV_COLLAPSE)`` copies a part
of 2 MiB into one huge page. Only parts that are nearly full are collapsed, so resident memory hardly grows. A copy takes 1 to 6 ms,
during which the thread does nothing else. So the memory of the start is collapsed before the first request, and later memory, such
as the tables of a model, one part at a time while there are no requests.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from gateway.metrics.telemetry import Telemetry
from gateway.process.time_slices import SLICE_SECONDS

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Most memory that is collapsed. A gateway with a small model has 40 MB; cached results and items of catalogues take more."""
MOST_SECONDS = 0.5
"""Most time for examining and copying parts, in all. The kernel may take long to find a huge page in fragmented memory."""
MOST_REFUSALS = 8
"""Refusals of the kernel after which no more is tried: it has no huge page left, or is too old."""
GROWTH_BYTES = 2 << 20
"""Growth of the resident memory above its highest value after which the memory is searched again: one huge page."""
NEARLY_FULL = 15 / 16
"""Least share of a part's pages that are resident. The others would be filled with zeros."""

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_PROCESS = Path("/proc/self")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MADV_COLLAPSE = 25
_ENTRY_BYTES = 8
_OWN = bytes(flags & 0b1010_0001 == 0b1000_0001 for flags in range(256))
"""Whether the highest byte of an entry of ``pagemap`` says: present (bit 63), not of a file (61), mapped once (56). A page of zeros
and a page that a fork shares are not mapped once; a copy of them would take more memory.
Source: Documentation/admin-guide/mm/pagemap.rst"""


class Kernel(Protocol):
    """Memory of this process. Methods raise :class:`OSError` where the system does not tell."""

    part_bytes: int
    """Size of a huge page."""

    def maps(self) -> Iterable[str]:
        """Return the lines of ``/proc/self/maps``."""

    def fill(self, address: int) -> float:
        """Return the share of the pages of the part at ``address`` that are resident and of this process only."""

    def collapse(self, address: int) -> bool:
        """Collapse the part at ``address`` and return whether it is a huge page now."""

    def resident_bytes(self) -> int:
        """Return the resident memory."""


class Linux:
    """Raises :class:`OSError` on systems without transparent huge pages, and where the operator has disabled them."""

    def __init__(self) -> None:
        if "[never]" in (_SETTINGS / "enabled").read_text():  # MADV_COLLAPSE itself does not heed this setting
            raise OSError("transparent huge pages are disabled")
        self.part_bytes = int((_SETTINGS / "hpage_pmd_size").read_text())
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def maps(self) -> Iterable[str]:
        return (_PROCESS / "maps").read_text().splitlines()

    def fill(self, address: int) -> float:
        pages = self.part_bytes // _PAGE_BYTES
        with (_PROCESS / "pagemap").open("rb", buffering=0) as file:
            entries = os.pread(file.fileno(), pages * _ENTRY_BYTES, address // _PAGE_BYTES * _ENTRY_BYTES)
        return entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_OWN).count(1) / pages

    def collapse(self, address: int) -> bool:
        return bool(self._madvise(address, self.part_bytes, _MADV_COLLAPSE) == 0)

    def resident_bytes(self) -> int:
        return int((_PROCESS / "statm").read_text().split()[1]) * _PAGE_BYTES


class HugePages:
    """Collapses the memory of this process. It does nothing where the system does not support it. Not thread-safe."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        kernel: Callable[[], Kernel] = Linux,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._kernel: Kernel | None = None
        self._parts: Iterator[int] | None = None
        """Parts that the search in progress has yet to examine; None without one."""
        self._collapsed = 0
        """Bytes of huge pages that this search has found or made."""
        self._seconds = 0.0
        self._refusals = 0
        self._highest = 0
        try:
            self._kernel = kernel()
        except (OSError, ValueError, AttributeError) as error:  # no such file, no number in it, no madvise
            self._end(str(error))

    def start(self) -> None:
        """Collapse the memory of now, before the first request: 0.1 s, at most :data:`MOST_SECONDS`."""
        self._carry_on(self._search)
        self._carry_on(lambda kernel: self._collapse(kernel, MOST_SECONDS))

    def tick(self) -> None:
        """Search the memory if it has grown, and collapse a part while there are no requests. Called a few times per second."""
        if not self._telemetry.in_flight:
            self._carry_on(self._step)

    def _carry_on(self, step: Callable[[Kernel], None]) -> None:
        if self._kernel is None:
            return
        try:
            step(self._kernel)
        except OSError as error:
            self._end(str(error))

    def _step(self, kernel: Kernel) -> None:
        if self._parts is not None:
            self._collapse(kernel, SLICE_SECONDS)
        elif kernel.resident_bytes() >= self._highest + GROWTH_BYTES:
            self._search(kernel)

    def _search(self, kernel: Kernel) -> None:
        self._highest = kernel.resident_bytes()
        self._parts = aligned_parts(kernel.maps(), kernel.part_bytes)
        self._collapsed = 0

    def _collapse(self, kernel: Kernel, seconds: float) -> None:
        """Collapse parts until ``seconds`` have passed; the last one may take longer."""
        began = self._clock()
        passed = 0.0
        for address in self._parts or ():
            if kernel.fill(address) >= NEARLY_FULL:
                if kernel.collapse(address):
                    self._collapsed += kernel.part_bytes
                else:
                    self._refusals += 1
            passed = self._clock() - began
            if self._refusals == MOST_REFUSALS or self._seconds + passed >= MOST_SECONDS:
                self._end("the kernel refuses" if self._refusals == MOST_REFUSALS else "out of time")
                return
            if self._collapsed >= MOST_BYTES:
                break
            if passed >= seconds:
                self._seconds += passed
                return
        self._seconds += passed
        self._parts = None

    def _end(self, reason: str) -> None:
        """Try no more."""
        logger.debug("no further huge pages: %s", reason)
        self._kernel = self._parts = None


def aligned_parts(maps: Iterable[str], part_bytes: int) -> Iterator[int]:
    """Yield the addresses of the parts of ``part_bytes`` that lie within private anonymous memory, such as the heap.
    ``maps``: lines of ``/proc/self/maps``."""
    for line in maps:
        span, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and (not name or name[0].startswith(("[heap]", "[anon:"))):
            begin, end = (int(edge, 16) for edge in span.split("-"))
            yield from range(-(-begin // part_bytes) * part_bytes, end - part_bytes + 1, part_bytes)
