"""Every straightforward way gives the engine's scores, so that their times can be compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.engine.ablations import PIPELINE, ablate, check, compare_loops, variants
from benchmarks.engine.engines import Engine, Stopwatch
from benchmarks.engine.records import Records
from benchmarks.engine.subject import subject
from benchmarks.engine.workload import Workload
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("bench"), "qwen3")
    with subject("small", str(directory), "float32") as tiny:
        return tiny.load()


@pytest.mark.slow
def test_all_score_alike_and_are_timed(decoder):
    engine, records = Engine(decoder, "float32", slots=4096), Records()
    scorers = variants(engine, decoder)
    times = ablate(scorers, VOCAB_SIZE, 2, 1e-4, records)
    assert times.keys() == scorers.keys()
    assert len(scorers) == 6
    for name, milliseconds in times.items():
        taken = [row["seconds"] for row in records.rows if row["name"] == name]
        assert len(taken) == 2
        assert milliseconds == pytest.approx(1000 * sum(taken) / 2)


def test_a_variant_that_computes_something_else_is_named(decoder):
    class Careless:
        def score(self, message):
            right = engine.score(message)
            return [[value + 0.01 for value in row] for row in right]

    engine = Engine(decoder, "float32", slots=4096)
    message = Workload().request("r", np.random.default_rng(0), VOCAB_SIZE)
    for exact in (True, False):
        assert check({"Yardstick": engine, "careless": Careless()}, message, 1e-3, exact=exact) == ["careless"]


@pytest.mark.slow
def test_both_loops_run_the_queue(decoder):
    loops = {name: Engine(decoder, "float32", overlap=name == "overlapped", slots=32_768) for name in ("overlapped", "synchronous")}
    records = Records()
    times = compare_loops(loops, VOCAB_SIZE, 1, records)
    assert times == {row["name"]: pytest.approx(1000 * row["seconds"] / PIPELINE) for row in records.rows}


def test_the_stopwatch_sums_what_it_is_around():
    watch = Stopwatch(gpu=False)
    timed = watch.around(lambda size: torch.ones(size))
    assert timed(3).shape == (3,)
    timed(4)
    assert 0 < watch.take() < 1
    assert watch.take() == 0
