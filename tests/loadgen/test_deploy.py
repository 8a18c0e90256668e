"""Several workers of one run: they start together, and ``kubectl apply -k`` sends their objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.loadgen.servers import serving
from tests.loadgen.test_client import good
from tests.parts import need
from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.runner import run
from yardstick_llm.loadgen.scenario import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "loadgen" / "deploy"


@cache
def rendered(folder: Path) -> dict[str, Any]:
    command = [need("kubectl"), "kustomize", str(folder)]
    documents = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {document["kind"]: document for document in documents}


def arguments(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container["command"]


def test_one_worker_needs_nothing_new(tmp_path: Path) -> None:
    found = rendered(DEPLOY)
    assert found.keys() == {"ConfigMap", "Job"}
    job = found["Job"]
    assert "completionMode" not in job["spec"], "unknown to Kubernetes 1.20"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"localhost/yardstick-gateway:{version}", "as `make images` and the chart call it"
    (volume,) = [volume for volume in job["spec"]["template"]["spec"]["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    file = tmp_path / "scenario.toml"
    file.write_text(found["ConfigMap"]["data"]["scenario.toml"])
    assert load(file).target.url == "http://yardstick"
    keys = {entry["valueFrom"]["secretKeyRef"]["name"] for entry in container["env"] if "valueFrom" in entry}
    assert keys == {"yardstick-load-key", "yardstick-first-key"}


def test_several_workers_are_an_indexed_job() -> None:
    job = rendered(ROOT / "loadgen" / "deploy-workers")["Job"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert arguments(job)[-2:] == ["--worker", "$(JOB_COMPLETION_INDEX)/2"]
    assert arguments(job)[:-2] == arguments(rendered(DEPLOY)["Job"])


def test_the_commands_are_of_the_program() -> None:
    from typer.main import get_command

    from yardstick_llm.loadgen.cli import app

    for folder in (DEPLOY, *(ROOT / "loadgen" / name for name in ("deploy-workers", "deploy-claim"))):
        words = arguments(rendered(folder)["Job"])
        assert words[:3] == ["python", "-m", "yardstick_llm.loadgen"]
        command = get_command(app).commands[words[3]]  # type: ignore[attr-defined]
        assert command.make_context("run", words[4:]).params["log_records"] is True


@pytest.mark.slow
def test_workers_start_together(tmp_path: Path) -> None:
    def start(url: str, index: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "yardstick_llm.loadgen", "run", "--url", url, "--rate", "20", "--duration", "0.3"]
        folders = ["--out", str(tmp_path / f"{index}"), "--together", str(tmp_path / "ready")]
        command += ["--worker", f"{index}/2", *folders]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    with serving(good) as url:
        first = start(url, 0)
        time.sleep(1)
        second = start(url, 1)
        ends = [process.communicate(timeout=30)[1] for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], ends
    records = [(tmp_path / f"{index}" / "records.jsonl").read_text() for index in (0, 1)]
    starts = [json.loads(text.splitlines()[0])["started"] for text in records]
    assert abs(starts[0] - starts[1]) < 0.5, "although one began a second later"
    with pytest.raises(LoadError, match="is left from an earlier run"):
        run(load(None), Share(0, 2), None, "test", tmp_path / "0", tmp_path / "ready")
    assert (tmp_path / "0" / "records.jsonl").read_text() == records[0], "a run that cannot begin leaves earlier records"


def test_workers_in_a_cluster_share_a_claim() -> None:
    job = rendered(ROOT / "loadgen" / "deploy-claim")["Job"]
    pod = job["spec"]["template"]["spec"]
    assert arguments(job)[:8] == arguments(rendered(ROOT / "loadgen" / "deploy-workers")["Job"])
    assert arguments(job)[8:] == ["--out", "/results/run-1/$(JOB_COMPLETION_INDEX)", "--together", "/results/run-1/ready"]
    (volume,) = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == volume]
    assert mount["mountPath"] == "/results"
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert {"scenario", "tmp"} < {volume["name"] for volume in pod["volumes"]}
