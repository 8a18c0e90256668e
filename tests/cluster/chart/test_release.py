"""A release in a registry, and installed from there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.chart.conftest import VALUES
from tests.cluster.chart.kube import HELM, Release, chart, wait_for
from tests.helm.chart import CHART, ROOT
from tests.processes import free_port

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]


@pytest.fixture
def registry(cluster: None, tmp_path: Path) -> Iterator[str]:
    """A registry of images and charts on this machine, whose node pulls from it."""
    program = shutil.which("docker-registry")
    if program is None or shutil.which("docker") is None:
        pytest.skip("needs docker and Debian's docker-registry, as tests/cluster/local.sh installs them")
    address = f"localhost:{free_port()}"
    config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(tmp_path / "data")}}, "http": {"addr": address}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    running = subprocess.Popen([program, "serve", tmp_path / "config.yaml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            return httpx.get(f"http://{address}/v2/").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, 10, "the registry answers")
        yield f"{address}/yardstick"
    finally:
        running.kill()
        running.wait()


def containers(release: Release, part: str) -> list[Any]:
    """What Kubernetes says of the containers of a part."""
    pods = release.core.list_namespaced_pod(release.namespace, label_selector=f"app.kubernetes.io/component={part}").items
    return [status for pod in pods for status in pod.status.container_statuses or []]


def test_a_release_is_installed_from_a_registry(registry: str, tmp_path: Path) -> None:
    """The gateway's image is the one that was built before, and nodes pull images by the digests that the registry gave. The same
    image with another label stands in for the engine's, which takes a minute to pack; its container ends at once."""
    images = {part: f"{registry}/yardstick-{part}:{VERSION}" for part in ("gateway", "engine")}
    environment = os.environ | {"CHART": str(chart()), "HELM": shlex.join(HELM), "PLAIN_HTTP": "1"}
    one = {part: VALUES[part] | {"replicas": 1} for part in images}
    release = Release(f"yardstick-test-{uuid.uuid4().hex[:6]}")
    built = f"localhost/yardstick-gateway:{VERSION}"
    try:
        subprocess.run(["docker", "tag", built, images["gateway"]], check=True)
        stand_in = f"FROM {built}\nLABEL stands-in-for=engine\n"
        subprocess.run(["docker", "build", "--tag", images["engine"], "-"], input=stand_in, text=True, check=True)
        publish = [ROOT / "scripts" / "release.sh", "publish", registry, tmp_path / "dist"]
        done = subprocess.run(publish, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        told = shlex.split(done.stdout.rpartition(": ")[2])
        assert told[:3] == ["helm", "install", release.name]
        release.run_helm("install", *told[3:6], "--plain-http", "--create-namespace", values=one)
        for part, image in images.items():
            wait_for(lambda part=part: any(one.image_id for one in containers(release, part)), 120, f"the {part}'s image is pulled")
            (container,) = containers(release, part)
            assert container.image_id.startswith(f"{image.removesuffix(f':{VERSION}')}@sha256:")
        wait_for(lambda: all(one.state.running for one in containers(release, "gateway")), 60, "the gateway runs")
    finally:
        release.delete_namespace()
        subprocess.run(["docker", "image", "rm", *images.values()], capture_output=True, check=False)
