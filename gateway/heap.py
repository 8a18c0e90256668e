"""Settings of glibc's heap, so that memory that a burst needed falls back by itself."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 32 << 10
"""From this size on, memory is mapped by itself and returned when it is freed. Parts of a body have 64 KB. glibc would raise the
threshold with each large piece that is freed, and keep 100 MB of parts after a burst; giving them back at once then takes 10 ms."""
SPARE_BYTES = 1 << 20


def return_freed_memory() -> None:
    """Apply the settings to this process, where its C library knows them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, SPARE_BYTES)
