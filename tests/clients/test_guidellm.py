"""guidellm measures a gateway: it asks ``/health``, and streams with token counts in every chunk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.environments import run_shell
from tests.processes import Program
from yardstick_llm.engine.demo import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FEW_WORKERS = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "GUIDELLM__MP_CONTEXT_TYPE": "forkserver"}
"""Each of its processes would import all of it, which takes seconds of CPU, and by default there are up to ten."""
SOON = {"GUIDELLM__SCHEDULER_START_DELAY_NON_DISTRIBUTED": "0.1"}
"""Seconds from the start of its worker to the first request, in place of one for each benchmark."""


def test_a_sweep_runs_to_its_end(demo: Program, cache: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    given = (demo.url, str(MODELS / "base"), str(report))
    run_shell("guidellm_sweep.sh", *given, environment="evaluation", seconds=300, **cache | FEW_WORKERS | SOON)
    benchmarks = json.loads(report.read_text())["benchmarks"]
    kinds = [benchmark["config"]["strategy"]["type_"] for benchmark in benchmarks]
    assert (kinds[:2], set(kinds[2:])) == (["synchronous", "throughput"], {"constant"})
    one_by_one = benchmarks[0]["requests"]
    assert (len(one_by_one["successful"]) in (5, 6), one_by_one["incomplete"]) == (True, []), "it may leave out its last one"
    for benchmark in benchmarks:
        requests = benchmark["requests"]
        assert requests["errored"] == []
        assert requests["successful"]
        assert all(request["output_metrics"]["text_tokens"] == 8 for request in requests["successful"])
