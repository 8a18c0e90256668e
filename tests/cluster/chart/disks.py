"""Volumes for claims in a cluster that makes none by itself: a folder on one node."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.cluster.chart.kube import Release, wait_for


class Disk(NamedTuple):
    """A volume, whose name is also its storage class, and a pod that has its files under ``/kept``."""

    name: str
    release: Release

    def files(self, folder: str = ".") -> dict[str, bytes]:
        """Contents of the files in a folder of the volume, by their names."""
        code = (
            "import base64, json, pathlib, sys\n"
            f"files = pathlib.Path('/kept/{folder}').iterdir()\n"
            "print(json.dumps({file.name: base64.b64encode(file.read_bytes()).decode() for file in files if file.is_file()}))"
        )
        told = json.loads(self.release.run_in(self.name, "python", "-c", code))
        return {name: base64.b64decode(content) for name, content in told.items()}


@contextmanager
def disk(release: Release, prefix: str) -> Iterator[Disk]:
    """A volume on a disk of one node. Its folder belongs to root, so pods can write only because Kubernetes gives it to their
    ``fsGroup``."""
    name = f"{prefix}-{uuid.uuid4().hex[:6]}"
    folder = f"/var/tmp/yardstick-{name}"
    (gateway, *_) = release.pods("gateway")
    pod = release.core.read_namespaced_pod(gateway, release.namespace)
    node, image = pod.spec.node_name, pod.spec.containers[0].image
    host = release.core.read_node(node).metadata.labels["kubernetes.io/hostname"]
    release.core.create_namespaced_pod(release.namespace, _keeper(name, folder, node, image))
    wait_for(lambda: release.ready(name), 60, "the volume's folder is there")
    release.core.create_persistent_volume(_volume(name, folder, host))
    try:
        yield Disk(name, release)
    finally:
        release.run_in(name, "sh", "-c", "rm -rf /kept/*")
        release.core.delete_persistent_volume(name)
        release.delete_pod(name, grace_seconds=0)


def _keeper(name: str, folder: str, node: str, image: str) -> dict[str, Any]:
    container = {
        "name": "keeper",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "volumeMounts": [{"name": "kept", "mountPath": "/kept"}],
        "securityContext": {"runAsUser": 0},
    }
    volume = {"name": "kept", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    return {"metadata": {"name": name}, "spec": {"nodeName": node, "containers": [container], "volumes": [volume]}}


def _volume(name: str, folder: str, host: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [host]}]}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": name,
        "local": {"path": folder},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    return {"metadata": {"name": name}, "spec": spec}
