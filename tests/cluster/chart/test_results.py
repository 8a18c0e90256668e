"""Results of the chart's load test on a claim."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.cluster.chart.conftest import VALUES
from tests.cluster.chart.disks import Disk, disk
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.test_load import DEPLOY
from tests.helm.chart import manifests

FILES = {"records.jsonl", "report.txt", "summary.json"}
RUN = (DEPLOY / "scenario.toml").read_text()
SCENARIO = RUN.replace("duration_s = 30", "duration_s = 4").replace("warmup_s = 5", "warmup_s = 1")
LOAD = "app.kubernetes.io/component=load"
STARTED_TOGETHER = 1.0
"""Largest gap between the starts of two workers, in seconds."""


@pytest.fixture(scope="module")
def claim(release: Release) -> Iterator[Disk]:
    """A claim of the same name as its volume."""
    with disk(release, "results") as found:
        spec = {
            "storageClassName": found.name,
            "volumeName": found.name,
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        }
        release.core.create_namespaced_persistent_volume_claim(release.namespace, {"metadata": {"name": found.name}, "spec": spec})
        yield found


@pytest.fixture(autouse=True)
def no_load_left(release: Release) -> Iterator[None]:
    """Turn the load test off, and remove its pods."""
    yield
    release.upgrade({"loadTest": {"enabled": False, "results": {"existingClaim": ""}}})
    wait_for(lambda: not release.objects(("batch/v1", "Job")), 60, "the Job is gone")
    wait_for(lambda: not release.pods("load"), 60, "its pods are gone")


def test_workers_share_a_claim_and_start_together(release: Release, claim: Disk, tmp_path: Path) -> None:
    """The pods of an Indexed Job, made from its template one after another, because such Jobs need Kubernetes 1.21."""
    values = VALUES | {"loadTest": {"enabled": True, "scenario": SCENARIO, "resources": {}, "workers": 2}}
    values["loadTest"]["results"] = {"existingClaim": claim.name}
    made = {m["kind"]: m for m in manifests(values) if m["metadata"]["labels"].get("app.kubernetes.io/component") == "load"}
    job = made["Job"]["metadata"]["name"]
    release.core.create_namespaced_config_map(release.namespace, made["ConfigMap"])
    pods = [f"{job}-{place}" for place in range(2)]
    try:
        release.core.create_namespaced_pod(release.namespace, worker(made["Job"], pods[0], 0))
        here = ("ls", f"/kept/{job}/ready")
        wait_for(lambda: "ready-0-of-2" in release.run_in(claim.name, *here), 60, "the first waits for the second")
        release.core.create_namespaced_pod(release.namespace, worker(made["Job"], pods[1], 1))
        wait_for(lambda: {phase(release, name) for name in pods} <= {"Succeeded", "Failed"}, 120, "the workers end")
        for name in pods:
            assert phase(release, name) == "Succeeded", release.core.read_namespaced_pod_log(name, release.namespace)
        began, requests = [], 0
        for place in range(2):
            kept = claim.files(f"{job}/{place}")
            assert set(kept) == FILES
            (folder := tmp_path / str(place)).mkdir()
            for name, content in kept.items():
                (folder / name).write_bytes(content)
            head = json.loads(kept["records.jsonl"].partition(b"\n")[0])
            began.append(head["started"])
            requests += json.loads(kept["summary.json"])["requests"]
        assert abs(began[0] - began[1]) < STARTED_TOGETHER
        assert again(tmp_path / "0", tmp_path / "1")["requests"] == requests > 2
    finally:
        for name in pods:
            with suppress(ApiException):
                release.delete_pod(name, grace_seconds=0)
        release.core.delete_namespaced_config_map(job, release.namespace)


def worker(job: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    """The pod that the Job's controller makes for one index."""
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    index_of_job = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
    spec = template["spec"] | {"containers": [container | {"env": [index_of_job, *container["env"]]}]}
    return {"metadata": template["metadata"] | {"name": name}, "spec": spec}


def phase(release: Release, pod: str) -> str:
    return str(release.core.read_namespaced_pod_status(pod, release.namespace).status.phase)


def again(*folders: Path) -> dict[str, Any]:
    """The line of JSON of ``yardstick load report`` over these folders."""
    command = [sys.executable, "-m", "loadgen", "report", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))
