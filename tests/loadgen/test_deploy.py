"""The objects that ``kubectl apply -k`` sends, and the results of the scenarios. Real clusters: ``tests/cluster``."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from loadgen.errors import LoadError
from loadgen.scenario import load
from loadgen.scenarios.cluster import State, job
from loadgen.scenarios.play import Play, Settings
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


class FakeCluster:
    """Two engines and their gateways; the load ends ``running`` looks after it began."""

    engines, gateways, service = "yardstick-engine", "yardstick", "yardstick"

    def __init__(self, ends: State = "passed", running: int = 4, away: Path | None = None) -> None:
        """``away``: a file that exists while the API does not answer."""
        self.acts: list[str] = []
        self._ends, self._looks, self._old, self._away = ends, running, True, away
        self.scenario, self.image = "", ""

    @property
    def engine_pods(self) -> list[str]:
        return ["yardstick-engine-0", "yardstick-engine-1"]

    def scale(self, count: int) -> None:
        self.acts.append(f"scale to {count}")

    def delete_pod(self, name: str, grace_seconds: int | None) -> None:
        self.acts.append(f"delete {name} with {grace_seconds}")

    def restart(self, kind: str, name: str) -> None:
        self.acts.append(f"restart {name}")

    def is_rolled_out(self, kind: str, name: str) -> bool:
        return True

    def answers(self) -> bool:
        return self._away is None or not self._away.exists()

    def delete_load(self) -> None:
        self.acts.append("delete load")

    def has_load(self) -> bool:
        self._old, old = False, self._old
        return old

    def start_load(self, scenario: str, image: str | None) -> None:
        self.acts.append("load")
        self.scenario, self.image = scenario, str(image)

    def load_log(self) -> str:
        return "sending to http://yardstick\nyardstick-load-records 0 1/1 AAAA\nthe table\n"

    def load_state(self) -> State:
        self._looks -= 1
        return self._ends if self._looks < 0 else "running"


def play(cluster: FakeCluster, name: str, **changes: Any) -> None:
    settings = msgspec.structs.replace(Settings(rate=7, duration=30, api_stop="true", api_start="true"), **changes)
    Play(name, cluster, settings, pause=lambda seconds: None).run()


LOADED = ["delete load", "load"]
ACTS = {
    "delete-engine": ["scale to 2", *LOADED, "delete yardstick-engine-0 with 0"],
    "scale-engines": ["scale to 2", *LOADED, "scale to 4", "scale to 1"],
    "rolling-restart": ["scale to 2", *LOADED, "restart yardstick-engine", "restart yardstick"],
}


@pytest.mark.parametrize("name", ACTS)
def test_a_scenario_acts_under_load(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster()
    play(cluster, name, image="registry:5000/gw:1.2", logs=tmp_path / "logs", grace_seconds=0)
    assert cluster.acts == ACTS[name]
    told = capsys.readouterr()
    assert told.out == "sending to http://yardstick\nthe table\n"
    assert told.err.rstrip().endswith(f"{name}: PASS")
    assert "yardstick-load-records" in (tmp_path / "logs" / f"{name}.log").read_text()
    file = tmp_path / "scenario.toml"
    file.write_text(cluster.scenario)
    applied = load(file)
    assert (applied.name, applied.duration_s, applied.arrivals.rate) == (name, 30, 7)  # type: ignore[union-attr]
    assert (applied.target.url, applied.target.cache, applied.target.keep_alive) == ("http://yardstick", False, True)
    assert cluster.image == "registry:5000/gw:1.2"


@pytest.mark.parametrize("name", [*ACTS, "apiserver-away"])
def test_a_missed_objective_fails_the_scenario(name: str, tmp_path: Path) -> None:
    away = tmp_path / "away"
    with pytest.raises(LoadError, match="an objective was not met"):
        play(FakeCluster(ends="failed", away=away), name, api_stop=f"touch {away}", api_start=f"rm {away}")


def test_an_api_that_goes_on_answering_fails_and_is_started_again(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="APISERVER_STOP did not stop it"):
        play(FakeCluster(), "apiserver-away", api_start=f"touch {tmp_path}/started")
    assert (tmp_path / "started").exists()
    with pytest.raises(LoadError, match="APISERVER_STOP and APISERVER_START are not set"):
        play(FakeCluster(), "apiserver-away", api_stop="")


def test_a_load_that_ended_too_early_proves_nothing() -> None:
    with pytest.raises(LoadError, match="raise --duration"):
        play(FakeCluster(running=0), "rolling-restart")


def test_the_job_has_the_image_of_make_images() -> None:
    (container,) = job(None)["spec"]["template"]["spec"]["containers"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert container["image"] == f"localhost/yardstick-gateway:{version}"
    assert job("registry:5000/gw:1.2")["spec"]["template"]["spec"]["containers"][0]["image"] == "registry:5000/gw:1.2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["other"], "there is no scenario 'other'"), (["delete-engine", "--objectives", "failures"], "write a list in TOML")],
)
def test_what_cannot_begin_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loadgen.scenarios", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("loadgen.scenarios", run_name="__main__")
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert words in said.err
    assert len(said.err.splitlines()) == 1


def test_a_command_without_a_cluster_is_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "loadgen.scenarios", "delete-engine"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "KUBECONFIG gives no access to a cluster" in done.stderr
    assert len(done.stderr.splitlines()) == 1
