"""The load generator as a Job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.readme import commands, follow
from tests.helm.chart import ROOT

JOB = "yardstick-load"
DEPLOY = ROOT / "loadgen" / "deploy"
OVERLAY = """
resources: [{deploy}]
configMapGenerator:
  - {{name: yardstick-load, behavior: merge, files: [scenario.toml]}}
generatorOptions: {{disableNameSuffixHash: true}}
"""


@pytest.fixture(autouse=True)
def no_job_left(release: Release) -> Iterator[None]:
    yield
    for delete in (release.batch.delete_namespaced_job, release.core.delete_namespaced_config_map):
        with suppress(ApiException):
            delete(JOB, release.namespace, propagation_policy="Foreground")
    wait_for(lambda: not release.objects(("batch/v1", "Job")), 60, "the Job is gone")


def apply(release: Release, folder: Path, **changes: str) -> None:
    """``kubectl apply -k``, with other values in the scenario."""
    text = (DEPLOY / "scenario.toml").read_text()
    for key, value in changes.items():
        text, count = re.subn(rf"^{key} = .*", f"{key} = {value}", text, flags=re.M)
        assert count == 1, key
    (folder / "scenario.toml").write_text(text)
    (folder / "kustomization.yaml").write_text(OVERLAY.format(deploy=os.path.relpath(DEPLOY, folder.resolve())))
    command = ["kubectl", "-n", release.namespace, "apply", "-k", str(folder)]
    subprocess.run(command, capture_output=True, timeout=60, check=True)


def report(log: str, folder: Path) -> dict[str, Any]:
    """Return the line of JSON that ``yardstick load report`` prints for a Job's log."""
    command = [sys.executable, "-m", "yardstick_llm.loadgen", "report", "-", "--out", str(folder)]
    done = subprocess.run(command, input=log, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in folder.iterdir()} == {"records.jsonl", "report.txt", "summary.json"}
    return json.loads((folder / "summary.json").read_text())


def test_a_job_tells_how_it_goes_and_its_log_is_the_run(release: Release, tmp_path: Path):
    apply(release, tmp_path, duration_s="12", warmup_s="1")
    follow_it = f"until kubectl -n {release.namespace} logs --follow job/{JOB}; do sleep 1; done"
    log = subprocess.run(["bash", "-c", follow_it], capture_output=True, text=True, timeout=120, check=True).stdout
    release.job_ended(JOB, "Complete", 30)
    assert "sending to http://yardstick for 12 s\n" in log
    assert re.search(r"^\d+ s of 12 · \d+ sent · ", log, flags=re.M), "progress"
    (told,) = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert "in-cluster: poisson arrivals (rate 2.0) for 12 s at http://yardstick" in log, "the table"
    made = report(log, tmp_path / "run")
    assert made == told
    assert made["requests"] > 10
    assert made["failures_by_kind"] == {}


def test_the_chart_runs_a_load(release: Release, tmp_path: Path):
    """The Job of ``loadTest``, without a claim and a store: its log is the run."""
    scenario = (
        (DEPLOY / "scenario.toml").read_text().replace("duration_s = 30", "duration_s = 4").replace("warmup_s = 5", "warmup_s = 1")
    )
    try:
        release.upgrade({"loadTest": {"enabled": True, "scenario": scenario, "resources": {}}}, wait=False)
        (job,) = release.batch.list_namespaced_job(release.namespace, label_selector="app.kubernetes.io/component=load").items
        release.job_ended(job.metadata.name, "Complete", 120)
        made = report(release.log("app.kubernetes.io/component=load"), tmp_path / "run")
        assert made["requests"] > 2
        assert made["failures_by_kind"] == {}
    finally:
        release.upgrade({"loadTest": {"enabled": False}})
    wait_for(lambda: not release.objects(("batch/v1", "Job")), 60, "the Job is gone")


def test_the_readme_word_for_word(release: Release, tmp_path: Path):
    """The section's commands; the server that it takes for granted is the release's."""
    typed = commands("Measure")
    assert len(typed) >= 3
    forward = f"kubectl -n {release.namespace} port-forward service/{release.name} 8000:80 >&2 &"
    ready = "curl --silent --retry 20 --retry-connrefused --output /dev/null http://127.0.0.1:8000/v1/models"
    done = follow([forward, ready, *typed], tmp_path, YARDSTICK_API_KEY=release.key)
    assert "before" in done.stdout
    assert "after" in done.stdout
