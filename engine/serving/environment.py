"""Variables of the loop process, which libraries read when it starts."""

from __future__ import annotations

from collections.abc import Mapping

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""glibc's malloc hands each large temporary back to the kernel and faults it in again; keeping them took 13-20 % off the CPU time
of forward passes of 256-1920 tokens (6 layers, hidden 512, float32)."""

IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads that wait for the next product sleep. By default libgomp lets them spin for milliseconds, on cores that gateway
and client need: beside another process, 32 streams of the demo model kept 34 % of their throughput, and with sleeping threads 78 %
(docs/benchmarks, "Threads that wait"). A bounded spin (``GOMP_SPINCOUNT=1000``) takes 15 % off the streams there, and adds 2 % to
scores."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user says how OpenMP threads wait; the first holds for every OpenMP library."""


def with_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` and what it leaves open."""
    chosen = MALLOC if any(name in environment for name in WAITING) else MALLOC | IDLE_THREADS
    return chosen | dict(environment)
