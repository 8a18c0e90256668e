"""Variables of the loop process, which libraries read when it starts."""

from __future__ import annotations

from collections.abc import Mapping

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""glibc's malloc hands each large temporary back to the kernel and faults it in again; keeping them took 13-20 % off the CPU time
of forward passes of 256-1920 tokens (6 layers, hidden 512, float32)."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""glibc's malloc (2.35 or newer) asks for transparent huge pages, 2 MiB in place of 4 KiB, where the kernel leaves the choice
to programs (``madvise``). A step reads every weight, and a core reads memory 1.4 times as fast in such pages: 15 in place of 11
GB/s (docs/benchmarks, "Huge pages")."""

PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""oneDNN, and torch's layer above it, keep compiled code and a description for each shape of a product: about 0.4 MiB together, and
1024 of each by default. Scores have another number of rows in nearly every step, so the engine of a tiny model grew by 800 MiB in
twelve scans of a catalogue. 256 hold the shapes of about 25 numbers of rows of a model with five shapes of weights, so that
generations find theirs. A shape that is missing costs 0.4 to 0.6 ms."""

IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads that wait for the next product sleep. By default libgomp lets them spin for milliseconds, on cores that gateway
and client need: beside another process, 32 streams of the demo model kept 34 % of their throughput, and with sleeping threads 78 %
(docs/benchmarks, "Threads that wait"). A bounded spin (``GOMP_SPINCOUNT=1000``) takes 15 % off the streams there, and adds 2 % to
scores."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user says how OpenMP threads wait; the first holds for every OpenMP library."""


def with_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` and what it leaves open."""
    waiting = {} if any(name in environment for name in WAITING) else IDLE_THREADS
    return MALLOC | HUGE_PAGES | PRODUCTS | waiting | dict(environment)
