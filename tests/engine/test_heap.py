"""The loop process returns free memory while there is no work."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import wire
from engine.serving.environment import with_defaults
from engine.serving.heap import GROWTH_BYTES, PAUSE_SECONDS, Heap
from tests.checkpoints import make_checkpoint
from tests.processes import Pod

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")

SLOTS, LABELS = 20_000, wire.Labels([5, 6])

GROW = """
from engine.serving import heap

heap.GROWTH_BYTES = 32 << 20
now = 0.0
trimmer = heap.Heap(lambda: now)
start = heap.resident_bytes()

def grow():
    blocks = [bytearray(b"1" * (1 << 20)) for _ in range(48)]
    last = bytearray(1 << 20)  # above the others: what is free is not at the end of the heap
    del blocks
    return last

assert not trimmer.trim(), "nothing has grown"
kept = [grow()]
full = heap.resident_bytes()
assert full - start > heap.GROWTH_BYTES, "the heap keeps what is freed"
assert trimmer.trim()
assert heap.resident_bytes() - start < 8 << 20
kept.append(grow())
now += heap.PAUSE_SECONDS - 1
assert not trimmer.trim(), "too early"
assert heap.resident_bytes() - start > heap.GROWTH_BYTES
now += 1
assert trimmer.trim()
assert heap.resident_bytes() - start < 8 << 20
"""


def test_free_memory_is_returned_when_it_is_much_and_not_too_often() -> None:
    subprocess.run([sys.executable, "-c", GROW], env=with_defaults(os.environ), timeout=60, check=True)


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.heap._malloc_trim", lambda: None)
    assert not Heap().trim()


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def pod(tmp_path: Path, as_in_production: None) -> Iterator[Pod]:
    pod = Pod(make_checkpoint(tmp_path, "qwen3"), "--name", "tiny", "--max-total-tokens", str(SLOTS))
    yield pod.wait_ready()
    pod.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scans_of_other_shapes_do_not_make_an_engine_grow(pod: Pod) -> None:
    """The first scans fill caches of libraries; later ones leave as much memory as they found, within one growth."""
    dice, after = random.Random(3), list[int]()
    for _ in range(8):
        left = 20_000
        while left > 0:
            count, query = dice.randrange(200, 2000), dice.choices(range(3, 200), k=dice.randrange(1, 6))
            items = b"".join(wire.pack_ids(dice.choices(range(3, 200), k=4)) for _ in range(count))
            status, answer = pod.ask("/score", wire.ScoreItems("scan", items, wire.pack_ids([4] * count), query, LABELS))
            assert status == 200, answer
            left -= count
        time.sleep(PAUSE_SECONDS / 4)  # idle: several looks, of which one may trim
        after.append(resident(pod.loop_pid))
    print("MiB after each scan:", [size >> 20 for size in after])
    assert max(after[4:]) < min(after[2:4]) + GROWTH_BYTES
