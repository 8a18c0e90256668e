"""A release in a registry, and installed from there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

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


def test_a_release_is_installed_from_a_registry(registry: str, tmp_path: Path) -> None:
    """The images are those that were built before; nodes pull them by the digests that the registry gave."""
    images = {part: f"{registry}/yardstick-{part}:{VERSION}" for part in ("gateway", "engine")}
    environment = os.environ | {"CHART": str(chart()), "HELM": shlex.join(HELM), "PLAIN_HTTP": "1"}
    one = {part: VALUES[part] | {"replicas": 1} for part in images}
    release = Release(f"yardstick-test-{uuid.uuid4().hex[:6]}")
    try:
        for part, image in images.items():
            subprocess.run(["docker", "tag", f"localhost/yardstick-{part}:{VERSION}", image], check=True)
        publish = [ROOT / "scripts" / "release.sh", "publish", registry, tmp_path / "dist"]
        done = subprocess.run(publish, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        told = shlex.split(done.stdout.rpartition(": ")[2])
        assert told[:3] == ["helm", "install", release.name]
        release.run_helm("install", *told[3:6], "--plain-http", "--create-namespace", "--wait", values=one)
        for part, image in images.items():
            (name,) = release.pods(part)
            (container,) = release.core.read_namespaced_pod(name, release.namespace).status.container_statuses
            assert container.image_id.startswith(f"{image.removesuffix(f':{VERSION}')}@sha256:")
    finally:
        release.delete_namespace()
        subprocess.run(["docker", "image", "rm", *images.values()], capture_output=True, check=False)
