"""kubectl and Helm as the tests use them, on the cluster that KUBECONFIG names."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, ROOT, Values

READY_SECONDS = 240
BIN = Path(__file__).parents[1] / "bin"
HELM = [found] if (found := shutil.which("helm")) else [sys.executable, str(BIN / "helm")]
"""The machine's own, else what stands in for it."""


@cache
def chart() -> Path:
    """The chart for the cluster that KUBECONFIG names. That cluster may be older than Chart.yaml allows, with newer APIs added to
    it; the chart then is a copy that allows it."""
    version = json.loads(kubectl("version", "-o", "json"))["serverVersion"]
    if int(version["minor"].rstrip("+")) >= 23:
        return CHART
    copy = Path(tempfile.mkdtemp()) / "helm"
    shutil.copytree(CHART, copy)
    about = copy / "Chart.yaml"
    about.write_text(re.sub(r"^kubeVersion: .*$", 'kubeVersion: ">=1.20.0-0"', about.read_text(), flags=re.M))
    return copy


class HelmError(RuntimeError):
    """What Helm says was wrong."""


def kubectl(*arguments: str, input: str | None = None, check: bool = True) -> str:
    """What kubectl prints; on failure the test fails with what it says."""
    done = subprocess.run(["kubectl", *arguments], input=input, capture_output=True, text=True, timeout=READY_SECONDS + 60)
    assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until ``condition`` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - began


class Release:
    """The chart, installed in a namespace of its own."""

    def __init__(self, namespace: str, name: str = "yardstick") -> None:
        self.namespace, self.name = namespace, name

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """In the release's namespace."""
        return kubectl("-n", self.namespace, *arguments, input=input, check=check)

    def get(self, *arguments: str) -> Any:
        """Objects, as JSON."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def install(self, values: Values, *, wait: bool = True) -> None:
        """Install, and wait until all of it is ready."""
        self.run_helm("install", chart(), "--create-namespace", *(["--wait"] if wait else []), values=values)

    def upgrade(self, values: Values, *, wait: bool = True) -> None:
        """Change the values given, keep the others, and wait."""
        self.run_helm("upgrade", chart(), "--reset-then-reuse-values", *(["--wait"] if wait else []), values=values)

    def rollback(self, revision: int) -> None:
        """Go back, and wait."""
        self.run_helm("rollback", str(revision), "--wait")

    def uninstall(self) -> None:
        """Take everything away, and wait."""
        self.run_helm("uninstall", "--wait")

    def test(self) -> str:
        """What its own test says."""
        return self.run_helm("test", "--logs")

    def run_helm(self, command: str, *arguments: str | Path, values: Values | None = None) -> str:
        """What a command of Helm prints. Raises HelmError."""
        given = ["--namespace", self.namespace, "--timeout", f"{READY_SECONDS}s", *(() if values is None else ("--values", "-"))]
        told = [*HELM, command, self.name, *arguments, *given]
        text = None if values is None else yaml.safe_dump(values)
        done = subprocess.run(told, input=text, capture_output=True, text=True, timeout=READY_SECONDS + 60, cwd=ROOT)
        if done.returncode != 0:
            raise HelmError(f"helm {command} {self.name}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def secret(self, name: str, key: str) -> str:
        """A value of a Secret."""
        return base64.b64decode(self.get("secret", name)["data"][key]).decode()

    @property
    def key(self) -> str:
        """The API key that the chart made."""
        return self.secret(f"{self.name}-first-key", "key")

    def pods(self, component: str) -> list[str]:
        """Names of the pods that are not ending."""
        found = self.get("pods", "-l", f"app.kubernetes.io/component={component}")["items"]
        return sorted(pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"])

    def rolled_out(self, what: str) -> None:
        """Wait until ``kind/name`` is as it is meant to be."""
        self.kubectl("rollout", "status", what, f"--timeout={READY_SECONDS}s")

    def engine_metric(self, pod: str, metric: str) -> float:
        """What an engine reports on its own port, asked through the API; 0 where it has no such series yet."""
        return self._metric(f"{pod}:8101", metric)

    def gateway_metric(self, pod: str, metric: str) -> float:
        """What a gateway reports, named with its labels, asked through the API; 0 where it has no such series yet."""
        return self._metric(f"{pod}:8000", metric)

    def _metric(self, address: str, metric: str) -> float:
        text = kubectl("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{address}/proxy/metrics", check=False)
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{metric} ")), 0.0)
