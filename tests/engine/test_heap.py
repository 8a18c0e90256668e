"""The loop process returns free memory while there is no work."""

from __future__ import annotations

import ctypes

import pytest

from tests.engine.tenants import Clock
from yardstick_llm.engine.server import loop_process
from yardstick_llm.engine.server.loop_process import PAUSE_SECONDS, Heap, resident_bytes

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")

MIB = 1 << 20


def grown() -> bytearray:
    """Let the heap grow by 64 MiB of free blocks, and return the block that keeps it from shrinking."""
    return [bytearray(b"x" * (64 << 10)) for _ in range(1024)][-1]


def test_a_heap_that_has_grown_is_trimmed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_process, "GROWTH_BYTES", 32 * MIB)
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed
    clock = Clock()
    heap = Heap(clock)
    assert not heap.trim(), "it has not grown"
    blocks = [grown()]
    before = resident_bytes()
    assert heap.trim()
    assert resident_bytes() < before - 48 * MIB
    blocks.append(grown())
    assert not heap.trim(), "it has just been trimmed"
    clock.now = PAUSE_SECONDS
    assert heap.trim()
