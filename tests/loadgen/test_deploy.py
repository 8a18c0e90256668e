"""The objects that ``kubectl apply -k`` sends, and the results of the scenarios. Real clusters: ``tests/cluster``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadgen.scenario import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "loadgen" / "deploy"
SCENARIOS = ROOT / "loadgen" / "scenarios"

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def rendered(folder: Path) -> dict[str, Any]:
    command = ["kubectl", "kustomize", str(folder)]
    documents = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {document["kind"]: document for document in documents}


def arguments(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container["command"]


@needs_kubectl
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


@needs_kubectl
def test_several_workers_are_an_indexed_job() -> None:
    job = rendered(ROOT / "loadgen" / "deploy-workers")["Job"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert arguments(job)[-2:] == ["--worker", "$(JOB_COMPLETION_INDEX)/2"]
    assert arguments(job)[:-2] == arguments(rendered(DEPLOY)["Job"])


@needs_kubectl
def test_the_commands_are_of_the_program() -> None:
    from typer.main import get_command

    from loadgen.cli import app

    for folder in (DEPLOY, *(ROOT / "loadgen" / name for name in ("deploy-workers", "deploy-claim"))):
        words = arguments(rendered(folder)["Job"])
        assert words[:3] == ["python", "-m", "loadgen"]
        command = get_command(app).commands[words[3]]  # type: ignore[attr-defined]
        assert command.make_context("run", words[4:]).params["log_records"] is True


KUBECTL = """#!/usr/bin/env bash
# Answers as a cluster does whose load ends, a moment after the first question, with STATE.
echo "$*" >> "$ASKED"
while [[ ${1:-} == --namespace ]]; do shift 2; done
case "$1 $2" in
  "get service") echo yardstick ;;
  "get statefulset") echo statefulset.apps/yardstick-engine ;;
  "get deployment") echo deployment.apps/yardstick ;;
  "get pods") printf 'pod/yardstick-engine-0\\npod/yardstick-engine-1\\n' ;;
  "logs job/yardstick-load") printf 'sending to http://yardstick\\nyardstick-load-records 0 1/1 AAAA\\nthe table\\n' ;;
  "get job/yardstick-load")
    if [[ $(grep -c 'get job/' "$ASKED") -gt ${RUNNING:-4} ]]; then echo "$STATE"; else echo /; fi ;;
  "apply --kustomize") cp -r "$3" "$ASKED.applied" ;;
  "version "*) exit "$(test -e "$ASKED.away" && echo 1 || echo 0)" ;;
esac
"""


def play(folder: Path, name: str, state: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a scenario against answers that are made up; what it asked."""
    tools = folder / "bin"
    tools.mkdir()
    for tool, text in (("kubectl", KUBECTL), ("sleep", "#!/bin/sh\n")):
        (tools / tool).write_text(text)
        (tools / tool).chmod(0o755)
    asked = folder / "asked"
    given = {"PATH": f"{tools}:{os.environ['PATH']}", "ASKED": str(asked), "STATE": state, "NAMESPACE": "ranking", **environment}
    done = subprocess.run([SCENARIOS / f"{name}.sh"], env=given, capture_output=True, text=True, timeout=60, check=False)
    return done, asked.read_text()


AWAY = {"APISERVER_STOP": 'touch "$ASKED.away"', "APISERVER_START": 'rm "$ASKED.away"'}
ACTS = {
    "delete-engine": ["delete pod/yardstick-engine-0 --wait=false"],
    "scale-engines": [f"scale statefulset.apps/yardstick-engine --replicas {count}" for count in (2, 4, 1)],
    "rolling-restart": ["rollout restart statefulset.apps/yardstick-engine", "rollout restart deployment.apps/yardstick"],
    "apiserver-away": ["version"],
}


def test_every_scenario_is_known() -> None:
    assert {file.stem for file in SCENARIOS.glob("*.sh")} == {*ACTS, "lib"}
    assert all(os.access(SCENARIOS / f"{name}.sh", os.X_OK) for name in ACTS)


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize(("state", "code"), [("1/", 0), ("/1", 1)])
def test_a_scenario_acts_and_ends_by_the_loads_verdict(tmp_path: Path, name: str, state: str, code: int) -> None:
    done, asked = play(
        tmp_path, name, state, IMAGE="registry:5000/gw:1.2", RATE="7", DURATION="30", LOGS=str(tmp_path / "logs"), **AWAY
    )
    assert done.returncode == code, done.stderr
    assert ("PASS" if code == 0 else "FAIL") in done.stderr.splitlines()[-1]
    assert done.stdout == "sending to http://yardstick\nthe table\n"
    place = 0
    for act in ACTS[name]:
        assert f"--namespace ranking {act}" in asked[place:]
        place = asked.index(act, place)
    assert asked.index("apply --kustomize") < asked.rindex(ACTS[name][-1]), "under load"
    (log,) = (tmp_path / "logs").iterdir()
    assert "yardstick-load-records" in log.read_text()
    applied = load(Path(f"{tmp_path}/asked.applied/scenario.toml"))
    assert (applied.name, applied.duration_s, applied.arrivals.rate) == (name, 30, 7)  # type: ignore[union-attr]
    if shutil.which("kubectl"):
        (container,) = rendered(Path(f"{tmp_path}/asked.applied"))["Job"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "registry:5000/gw:1.2"


def test_a_load_that_ended_too_early_proves_nothing(tmp_path: Path) -> None:
    done, _ = play(tmp_path, "rolling-restart", "1/", RUNNING="0")
    assert done.returncode == 1
    assert "raise DURATION" in done.stderr


def test_stopping_the_api_needs_to_be_told_how(tmp_path: Path) -> None:
    done = subprocess.run([SCENARIOS / "apiserver-away.sh"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "APISERVER_STOP" in done.stderr


def test_scripts_are_shell() -> None:
    for file in SCENARIOS.glob("*.sh"):
        subprocess.run(["bash", "-n", shlex.quote(str(file))], check=True)
