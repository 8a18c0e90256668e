"""The objects that ``kubectl apply -k`` sends. Real clusters: ``tests/cluster``."""

from __future__ import annotations

import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from loadgen.scenario import load
from tests.parts import need

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

    from loadgen.cli import app

    for folder in (DEPLOY, *(ROOT / "loadgen" / name for name in ("deploy-workers", "deploy-claim"))):
        words = arguments(rendered(folder)["Job"])
        assert words[:3] == ["python", "-m", "loadgen"]
        command = get_command(app).commands[words[3]]  # type: ignore[attr-defined]
        assert command.make_context("run", words[4:]).params["log_records"] is True
