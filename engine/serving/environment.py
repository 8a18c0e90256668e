"""Variables of the loop process, which libraries read when it starts."""

from __future__ import annotations

from collections.abc import Mapping

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""glibc's malloc hands each large temporary back to the kernel and faults it in again; keeping them took 13-20 % off the CPU time
of forward passes of 256-1920 tokens (6 layers, hidden 512, float32)."""

IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""OpenMP threads that wait for the next product spin for a thousand turns, some tens of microseconds, and then sleep. libgomp,
which torch's wheels for Linux bring, reads the second variable, other libraries the first. By default libgomp lets threads spin
for milliseconds, on cores that gateway and client need (docs/benchmarks, "Threads that wait")."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user says how OpenMP threads wait; the first holds for every OpenMP library."""


def with_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` and what it leaves open."""
    chosen = MALLOC if any(name in environment for name in WAITING) else MALLOC | IDLE_THREADS
    return chosen | dict(environment)
