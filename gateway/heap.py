"""Settings of glibc's allocator that return memory to the system after a burst."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 32 << 10
"""Size from which an allocation gets its own memory mapping, which is unmapped when it is freed. Parts of a body have 64 KB. By
default glibc raises this threshold with each large block that is freed and keeps 100 MB of parts after a burst; trimming them at
once then takes 10 ms."""
SPARE_BYTES = 1 << 20


def return_freed_memory() -> None:
    """Apply the settings to this process, if its C library supports them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, SPARE_BYTES)
