"""A release and the load Job beside it, by the API of Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from loadgen.errors import LoadError

DEPLOY = Path(__file__).parents[1] / "deploy"
JOB = "yardstick-load"
RESTARTED = "kubectl.kubernetes.io/restartedAt"

Kind = Literal["stateful_set", "deployment"]
State = Literal["running", "passed", "failed"]


class Cluster:
    """One pool of engines, the gateways and the load, in one namespace. Methods raise :class:`LoadError` for what is missing."""

    def __init__(self, namespace: str | None, release: str, pool: str) -> None:
        """``namespace``: None is that of the kubeconfig's current context."""
        try:
            context = config.list_kube_config_contexts()[1]["context"]
            api = config.new_client_from_config()
        except config.ConfigException as error:
            raise LoadError(f"KUBECONFIG gives no access to a cluster: {error}") from None
        self.namespace: str = namespace or context.get("namespace", "default")
        self._release, self._pool = release, pool
        self._core, self._apps, self._batch = client.CoreV1Api(api), client.AppsV1Api(api), client.BatchV1Api(api)

    @property
    def engines(self) -> str:
        """Name of the StatefulSet of the pool."""
        return self._name("stateful_set", self._apps.list_namespaced_stateful_set, "engine")

    @property
    def gateways(self) -> str:
        """Name of the Deployment."""
        return self._name("deployment", self._apps.list_namespaced_deployment, "gateway")

    @property
    def service(self) -> str:
        """Name of the gateways' Service."""
        return self._name("service", self._core.list_namespaced_service, "gateway")

    @property
    def engine_pods(self) -> list[str]:
        """Names of the pool's pods."""
        found = self._core.list_namespaced_pod(self.namespace, label_selector=self._labels("engine")).items
        return [pod.metadata.name for pod in found]

    def scale(self, count: int) -> None:
        """Set the number of engines."""
        self._apps.patch_namespaced_stateful_set_scale(self.engines, self.namespace, {"spec": {"replicas": count}})

    def delete_pod(self, name: str, grace_seconds: int | None) -> None:
        """Delete a pod; with 0 seconds of grace it is killed."""
        self._core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=grace_seconds)

    def restart(self, kind: Kind, name: str) -> None:
        """Replace all pods, as ``kubectl rollout restart`` does."""
        annotations = {RESTARTED: datetime.now(UTC).isoformat()}
        patch = getattr(self._apps, f"patch_namespaced_{kind}")
        patch(name, self.namespace, {"spec": {"template": {"metadata": {"annotations": annotations}}}})

    def is_rolled_out(self, kind: Kind, name: str) -> bool:
        """Whether all pods are of the newest version and ready, and none is ending."""
        found = getattr(self._apps, f"read_namespaced_{kind}")(name, self.namespace)
        labels = ",".join(f"{key}={value}" for key, value in found.spec.selector.match_labels.items())
        pods = self._core.list_namespaced_pod(self.namespace, label_selector=labels).items
        if any(pod.metadata.deletion_timestamp for pod in pods):
            return False
        status = found.status
        updated = status.updated_replicas
        if kind == "stateful_set" and status.current_revision == status.update_revision:
            updated = status.replicas
        counts = {status.replicas or 0, status.ready_replicas or 0, updated or 0}
        return bool(status.observed_generation == found.metadata.generation and counts == {found.spec.replicas})

    def answers(self) -> bool:
        """Whether the API answers."""
        try:
            self._core.read_namespace(self.namespace, _request_timeout=2)
        except (ApiException, HTTPError):
            return False
        return True

    def delete_load(self) -> None:
        """Begin to delete an earlier Job with its pods."""
        for delete in (self._batch.delete_namespaced_job, self._core.delete_namespaced_config_map):
            try:
                delete(JOB, self.namespace, propagation_policy="Foreground")
            except ApiException as error:
                if error.status != 404:
                    raise

    def has_load(self) -> bool:
        """Whether a Job of an earlier run is still there."""
        return any(job.metadata.name == JOB for job in self._batch.list_namespaced_job(self.namespace).items)

    def start_load(self, scenario: str, image: str | None) -> None:
        """Create the Job of ``loadgen/deploy`` with this scenario."""
        metadata = {"name": JOB}
        self._core.create_namespaced_config_map(self.namespace, {"metadata": metadata, "data": {"scenario.toml": scenario}})
        self._batch.create_namespaced_job(self.namespace, job(image))

    def load_log(self) -> str:
        """The log of the load so far; empty while there is none."""
        try:
            pods = self._core.list_namespaced_pod(self.namespace, label_selector=f"job-name={JOB}").items
            return "".join(self._core.read_namespaced_pod_log(pod.metadata.name, self.namespace) for pod in pods)
        except (ApiException, HTTPError):
            return ""

    def load_state(self) -> State:
        """State of the load; it counts as running while the API is away."""
        try:
            status = self._batch.read_namespaced_job_status(JOB, self.namespace).status
        except (ApiException, HTTPError):
            return "running"
        return "passed" if status.succeeded else "failed" if status.failed else "running"

    def _labels(self, component: str) -> str:
        labels = f"app.kubernetes.io/instance={self._release},app.kubernetes.io/component={component}"
        return f"{labels},yardstick/pool={self._pool}" if component == "engine" else labels

    def _name(self, what: str, objects: Any, component: str) -> str:
        labels = self._labels(component)
        found = objects(self.namespace, label_selector=labels).items
        if not found:
            raise LoadError(
                f"the namespace {self.namespace} has no {what} with the labels {labels}; set NAMESPACE, RELEASE and POOL"
            )
        return str(found[0].metadata.name)


def job(image: str | None) -> dict[str, Any]:
    """The Job of ``loadgen/deploy`` with the image NAME:TAG, or that of its kustomization."""
    if image is None:
        (chosen,) = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text(encoding="utf-8"))["images"]
        image = f"{chosen['newName']}:{chosen['newTag']}"
    manifest: dict[str, Any] = yaml.safe_load((DEPLOY / "job.yaml").read_text(encoding="utf-8"))
    manifest["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return manifest
