"""The loop process returns free memory while there is no work."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import Pod
from yardstick_llm.engine import wire
from yardstick_llm.engine.server.loop_process import GROWTH_BYTES, PAUSE_SECONDS

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")

SLOTS, LABELS = 20_000, wire.Labels([5, 6])


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
        left = 8_000
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
