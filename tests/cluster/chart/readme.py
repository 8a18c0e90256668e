"""The README's commands, as a new user types them: in order, in one shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cluster.chart.kube import BIN, chart
from tests.helm.chart import ROOT


def commands(heading: str) -> list[str]:
    """Return the commands of a section without their prompts."""
    section = re.search(rf"^## {heading}$(.*?)^## ", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert section
    return [
        re.sub(r"^(  |\$ )", "", line, flags=re.M)
        for block in re.findall(r"```console\n(.*?)```", section[1], flags=re.S)
        for line in re.findall(r"^\$ (.*(?:\n  .*)*)", block, flags=re.M)
    ]


def follow(typed: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the commands in ``folder``, which gets what they need of the checkout and what they leave behind."""
    for name in ("loadgen", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "helm").symlink_to(chart())
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    for command in typed:
        script += f"echo {shlex.quote(f'>>> {command}')} >&2\n{command}\n"
    # Behind the machine's own programs, the `helm` that stands in for one, and the Python that runs the tests for it.
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:{BIN}"} | environment
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
