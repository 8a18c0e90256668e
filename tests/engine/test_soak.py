"""100,000 scored items in one process, some of them aborted: no slot is lost and memory stays flat."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.integrity import check
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.settings import EngineSettings

ITEMS = 50_000


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlap", [False, True])
def test_soak(tmp_path: Path, overlap: bool):
    rng = random.Random(0)
    model = make_checkpoint(tmp_path, "qwen3", hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=4)
    loop = build_loop(EngineSettings(model=str(model), name="t", max_total_tokens=8192, overlap=overlap))
    sent, ended, expected, after_warm_up = 0, 0, 0, 0.0
    while sent < ITEMS:
        for _ in range(4):
            items = rng.randint(1, 400)
            query = [rng.randrange(3, 300) for _ in range(rng.randint(0, 20))]
            loop.submit(
                wire.Score(
                    f"s{expected}", query, [[rng.randrange(3, 300)] * rng.randint(1, 4) for _ in range(items)], wire.Labels([1, 2])
                )
            )
            expected, sent = expected + 1, sent + items
        if rng.random() < 0.2:
            loop.submit(wire.Abort(f"s{expected - rng.randint(1, 4)}"))
        ended += len(loop.step())
        if expected % 100 == 0:
            check(loop._scheduler)
            after_warm_up = after_warm_up or resident_mib()
    while not loop.idle:
        ended += len(loop.step())
    assert ended == expected
    check(loop._scheduler)
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == 8192
    assert resident_mib() < 1.1 * after_warm_up + 16
