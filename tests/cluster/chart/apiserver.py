"""The apiserver, where the cluster is one on this machine: a process that can be killed and started again."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.cluster.chart.kube import api, wait_for

_RUN = Path(os.environ.get("CLUSTER_DIR", "/var/tmp/yardstick-cluster")) / "run"
_PID = _RUN / "pid" / "apiserver"


class ApiServer:
    """As it runs now. ``stop`` and ``start`` are commands of a shell."""

    def __init__(self) -> None:
        """Raises FileNotFoundError where there is no such process."""
        pid = int(_PID.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
        log = shlex.quote(str(_RUN / "log" / "apiserver.log"))
        self.stop = f"kill -9 {pid}"
        self.start = f"setsid nohup {shlex.join(command)} >>{log} 2>&1 </dev/null & echo $! >{shlex.quote(str(_PID))}"

    def kill(self) -> None:
        """At once: on SIGTERM it would wait for the watches of others to end."""
        subprocess.run(["bash", "-c", self.stop], check=True)

    def start_again(self) -> None:
        """And wait until it answers."""
        subprocess.run(["bash", "-c", self.start], check=True)
        wait_for(_answers, 60, "the apiserver is back")


def _answers() -> bool:
    try:
        return bool(client.VersionApi(api()).get_code(_request_timeout=2).major)
    except (ApiException, HTTPError):
        return False
