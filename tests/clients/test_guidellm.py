"""guidellm measures a gateway: it asks ``/health``, and streams with token counts in every chunk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.demo import MODELS
from tests.clients.environments import run_shell
from tests.processes import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FEW_WORKERS = {"GUIDELLM__MAX_WORKER_PROCESSES": "2"}
"""Each of its processes imports all of it, which takes a second of CPU; by default there are up to ten."""


def test_every_request_is_measured(demo: Program, cache: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_shell(
        "guidellm_run.sh", demo.url, str(MODELS / "base"), str(report), environment="evaluation", seconds=200, **cache | FEW_WORKERS
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["incomplete"], requests["errored"]) == (5, [], [])
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8


def test_a_sweep_runs_to_its_end(demo: Program, cache: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_shell(
        "guidellm_sweep.sh",
        demo.url,
        str(MODELS / "base"),
        str(report),
        environment="evaluation",
        seconds=300,
        **cache | FEW_WORKERS,
    )
    benchmarks = json.loads(report.read_text())["benchmarks"]
    kinds = [benchmark["config"]["strategy"]["type_"] for benchmark in benchmarks]
    assert (kinds[:2], set(kinds[2:])) == (["synchronous", "throughput"], {"constant"})
    for benchmark in benchmarks:
        requests = benchmark["requests"]
        assert requests["errored"] == []
        assert requests["successful"]
        assert all(request["output_metrics"]["text_tokens"] == 8 for request in requests["successful"])
