"""kubectl and Helm as the tests use them, on the cluster that KUBECONFIG names."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import helm_python

from tests.helm.chart import CHART, Values

READY_SECONDS = 240


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
        self._config = helm_python.Config(namespace=namespace)

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """In the release's namespace."""
        return kubectl("-n", self.namespace, *arguments, input=input, check=check)

    def get(self, *arguments: str) -> Any:
        """Objects, as JSON."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def install(self, values: Values) -> None:
        """Install and wait until all of it is ready."""
        self._config.install(CHART, self.name, values, create_namespace=True, wait="watcher", timeout=READY_SECONDS)

    def upgrade(self, values: Values) -> None:
        """Change the values given, keep the others, and wait."""
        self._config.upgrade(CHART, self.name, values, reuse_values=True, wait="watcher", timeout=READY_SECONDS)

    def rollback(self, revision: int) -> None:
        """Go back, and wait."""
        self._config.rollback(self.name, version=revision, wait="watcher", timeout=READY_SECONDS)

    def uninstall(self) -> None:
        """Take everything away, and wait."""
        self._config.uninstall(self.name, wait="watcher", timeout=READY_SECONDS)

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
        text = kubectl("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod}:8101/proxy/metrics", check=False)
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{metric} ")), 0.0)
