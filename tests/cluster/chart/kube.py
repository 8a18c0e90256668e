"""A release of the chart on the cluster that KUBECONFIG names, by Helm and by the API of Kubernetes."""

from __future__ import annotations

import atexit
import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ResourceNotFoundError
from kubernetes.stream import stream

from tests.helm.chart import CHART, ROOT, Values
from yardstick_llm.gateway.process.kubernetes import find_access

READY_SECONDS = 240
RESTARTED = "kubectl.kubernetes.io/restartedAt"
BIN = Path(__file__).parents[1] / "bin"
HELM = [found] if (found := shutil.which("helm")) else [sys.executable, str(BIN / "helm")]
"""The machine's own Helm, else what stands in for it."""


@cache
def api() -> client.ApiClient:
    """A client of the cluster's API, with the rights of KUBECONFIG."""
    return find_access(os.environ).client


@cache
def dynamic_client() -> DynamicClient:
    """A client of any kind of object, which asks once for all kinds that there are."""
    return DynamicClient(api())


@cache
def chart() -> Path:
    """The chart for the cluster that KUBECONFIG names. That cluster may be older than Chart.yaml allows, with newer APIs added to
    it; the chart then is a copy that allows it."""
    if int(client.VersionApi(api()).get_code().minor.rstrip("+")) >= 23:
        return CHART
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    copy = Path(folder) / "helm"
    shutil.copytree(CHART, copy)
    about = copy / "Chart.yaml"
    about.write_text(re.sub(r"^kubeVersion: .*$", 'kubeVersion: ">=1.20.0-0"', about.read_text(), flags=re.M))
    return copy


class HelmError(RuntimeError):
    """Helm's error message."""


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until ``condition`` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.3)
    return time.monotonic() - began


class Release:
    """The chart, installed in a namespace of its own."""

    def __init__(self, namespace: str, name: str = "yardstick") -> None:
        self.namespace, self.name = namespace, name
        self.core, self.apps, self.batch = client.CoreV1Api(api()), client.AppsV1Api(api()), client.BatchV1Api(api())

    def install(self, values: Values, *, wait: bool = True) -> None:
        """Install the chart, and wait until all of it is ready."""
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
        """The output of the chart's own test."""
        return self.run_helm("test", "--logs")

    def run_helm(self, command: str, *arguments: str | Path, values: Values | None = None) -> str:
        """The output of a command of Helm. Raises HelmError."""
        given = ["--namespace", self.namespace, "--timeout", f"{READY_SECONDS}s", *(() if values is None else ("--values", "-"))]
        told = [*HELM, command, self.name, *arguments, *given]
        text = None if values is None else yaml.safe_dump(values)
        done = subprocess.run(told, input=text, capture_output=True, text=True, timeout=READY_SECONDS + 60, cwd=ROOT)
        if done.returncode != 0:
            raise HelmError(f"helm {command} {self.name}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def create_namespace(self) -> None:
        """Create the namespace before Helm does, unless it exists."""
        try:
            self.core.create_namespace({"metadata": {"name": self.namespace}})
        except ApiException as error:
            if error.status != 409:
                raise

    def delete_namespace(self) -> None:
        """Delete the namespace with all that is in it, without waiting."""
        try:
            self.core.delete_namespace(self.namespace)
        except ApiException as error:
            if error.status != 404:
                raise

    def secret(self, name: str, key: str) -> str:
        """A value of a Secret."""
        return base64.b64decode(self.core.read_namespaced_secret(name, self.namespace).data[key]).decode()

    @property
    def key(self) -> str:
        """The API key that the chart made."""
        return self.secret(f"{self.name}-first-key", "key")

    def objects(self, *kinds: tuple[str, str]) -> set[str]:
        """Names, as KIND/NAME, of the objects of these API versions and kinds. A kind that the cluster lacks has none."""
        dynamic, found = dynamic_client(), set()
        for version, kind in kinds:
            try:
                resource = dynamic.resources.get(api_version=version, kind=kind)
            except ResourceNotFoundError:
                continue
            found |= {f"{kind}/{item.metadata.name}" for item in resource.get(namespace=self.namespace).items}
        return found

    def pods(self, component: str) -> list[str]:
        """Names of the pods that are not ending."""
        labels = f"app.kubernetes.io/component={component}"
        found = self.core.list_namespaced_pod(self.namespace, label_selector=labels).items
        return sorted(pod.metadata.name for pod in found if pod.metadata.deletion_timestamp is None)

    def delete_pod(self, name: str, grace_seconds: int | None = None) -> None:
        """Delete a pod without waiting; with 0 seconds of grace it is killed."""
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=grace_seconds)

    def evict(self, pod: str) -> bool:
        """Evict a pod, as when its node is drained; whether its PodDisruptionBudget allows it."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}
        try:
            self.core.create_namespaced_pod_eviction(pod, self.namespace, body)
        except ApiException as error:
            if error.status != 429:
                raise
            return False
        return True

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods of a StatefulSet."""
        self.apps.patch_namespaced_stateful_set_scale(name, self.namespace, {"spec": {"replicas": replicas}})

    def restart(self, name: str, kind: Literal["deployment", "stateful_set"] = "deployment") -> None:
        """Replace all pods, as ``kubectl rollout restart`` does."""
        annotations = {RESTARTED: datetime.now(UTC).isoformat()}
        change = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
        getattr(self.apps, f"patch_namespaced_{kind}")(name, self.namespace, change)

    def rolled_out(self, name: str) -> None:
        """Wait until all pods of a StatefulSet are of its newest version and ready, and none is ending."""
        wait_for(lambda: self._is_rolled_out(name), READY_SECONDS, f"{name} is rolled out")

    def _is_rolled_out(self, name: str) -> bool:
        found = self.apps.read_namespaced_stateful_set(name, self.namespace)
        status, wanted = found.status, found.spec.replicas
        labels = ",".join(f"{key}={value}" for key, value in found.spec.selector.match_labels.items())
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=labels).items
        return bool(
            status.observed_generation == found.metadata.generation
            and not any(pod.metadata.deletion_timestamp for pod in pods)
            and status.replicas == (status.ready_replicas or 0) == wanted
            and status.current_revision == status.update_revision
        )

    def deployed(self, name: str) -> None:
        """Wait until all pods of a Deployment are of its newest version and available, and no other is left."""
        wait_for(lambda: self._is_deployed(name), READY_SECONDS, f"{name} is rolled out")

    def _is_deployed(self, name: str) -> bool:
        found = self.apps.read_namespaced_deployment(name, self.namespace)
        status, wanted = found.status, found.spec.replicas
        counts = {status.replicas, status.updated_replicas, status.available_replicas}
        return bool(status.observed_generation == found.metadata.generation and counts == {wanted})

    def revision(self) -> int:
        """The number of the newest revision of the release."""
        secrets = self.core.list_namespaced_secret(self.namespace, label_selector=f"owner=helm,name={self.name}").items
        return max(int(secret.metadata.labels["version"]) for secret in secrets)

    def waits_for_image(self, component: str) -> bool:
        """Whether a pod cannot get its image."""
        labels = f"app.kubernetes.io/component={component}"
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=labels).items
        states = [one.state.waiting for pod in pods for one in pod.status.container_statuses or []]
        return any(state and state.reason in ("ErrImagePull", "ImagePullBackOff") for state in states)

    def ready(self, pod: str) -> bool:
        """Whether a pod exists and is ready."""
        try:
            conditions = self.core.read_namespaced_pod_status(pod, self.namespace).status.conditions or []
        except ApiException as error:
            if error.status != 404:
                raise
            return False
        return any(one.type == "Ready" and one.status == "True" for one in conditions)

    def run_in(self, pod: str, *command: str) -> str:
        """Run a command in a pod's first container; returns what it prints, and the API's error where it cannot run."""
        connect = self.core.connect_get_namespaced_pod_exec
        options = {"stdout": True, "stderr": True, "_preload_content": False}
        try:
            running = stream(connect, pod, self.namespace, command=list(command), **options)
        except ApiException as error:
            return str(error.reason)
        try:
            running.run_forever(timeout=60)
            return str(running.read_all())
        finally:
            running.sock.shutdown()  # `close` leaves the socket open if the server has ended the connection

    def engine_metric(self, pod: str, metric: str) -> float:
        """A metric of an engine's own port, read through the API; 0 where it has no such series yet."""
        return self._metric(f"{pod}:8101", metric)

    def gateway_metric(self, pod: str, metric: str) -> float:
        """A metric of a gateway, named with its labels, read through the API; 0 where it has no such series yet."""
        return self._metric(f"{pod}:8000", metric)

    def _metric(self, address: str, metric: str) -> float:
        try:
            text = self.core.connect_get_namespaced_pod_proxy_with_path(address, self.namespace, "metrics")
        except ApiException:
            return 0.0
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{metric} ")), 0.0)

    def job_ended(self, name: str, condition: str, seconds: float) -> None:
        """Wait until a Job has the condition ``Complete`` or ``Failed``."""

        def ended() -> set[str]:
            status: Any = self.batch.read_namespaced_job_status(name, self.namespace).status
            return {one.type for one in status.conditions or [] if one.status == "True"}

        wait_for(lambda: bool(ended() & {"Complete", "Failed"}), seconds, f"{name} ends")
        assert condition in ended()

    def log(self, selector: str) -> str:
        """The whole log of the one pod that has these labels."""
        (pod,) = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return str(self.core.read_namespaced_pod_log(pod.metadata.name, self.namespace))
