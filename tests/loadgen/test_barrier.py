"""Workers that wait for each other, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadgen import runner
from loadgen.arrivals import Share
from loadgen.errors import LoadError
from loadgen.runner import meet, run
from loadgen.scenario import load
from tests.loadgen.servers import serving
from tests.loadgen.test_client import good
from tests.loadgen.test_deploy import ROOT, arguments, rendered


def test_workers_start_together(tmp_path: Path) -> None:
    def start(url: str, index: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "loadgen", "run", "--url", url, "--rate", "20", "--duration", "0.3"]
        folders = ["--out", str(tmp_path / f"{index}"), "--together", str(tmp_path / "ready")]
        command += ["--worker", f"{index}/2", *folders]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
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


def test_a_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WAIT_SECONDS", 0.1)
    with pytest.raises(LoadError, match=r"1 of 2 workers were ready within 0\.1 s"):
        asyncio.run(meet(tmp_path, Share(0, 2), lambda: False))
    asyncio.run(meet(tmp_path / "stopped", Share(0, 2), lambda: True))
    with pytest.raises(LoadError, match="name a folder that all workers can write"):
        asyncio.run(meet(Path("/dev/null/x"), Share(0, 2), lambda: False))


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
