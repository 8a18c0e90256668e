"""The images' recipes; what comes of them is looked at on a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILES = ["gateway/Dockerfile", "engine/Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES)
def test_they_stand_on_one_pinned_base_and_run_as_nobody(path: str) -> None:
    text = (ROOT / path).read_text()
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+\.\d+\S*$", text, flags=re.M)
    assert set(re.findall(r"^FROM (\S+)", text, flags=re.M)) == {"${BASE}"}
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, flags=re.M), "by number, so that Kubernetes can tell that it is not root"
    assert "pip" not in last, "what installs is left behind"


def test_the_gateways_has_no_engine_but_the_contract() -> None:
    text = (ROOT / "gateway" / "Dockerfile").read_text()
    assert re.findall(r"^COPY (engine\S*.*) /opt", text, flags=re.M) == ["engine/__init__.py", "engine/wire.py"]
    assert re.findall(r"extras\['(\w+)'\]", text) == ["tracing"]


def test_the_cuda_image_compiles_launchers_and_no_kernels_of_flashinfer() -> None:
    text = (ROOT / "engine" / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"apt-get install --yes --no-install-recommends gcc libc6-dev \$\{headers\}", last)
    assert not re.search(r"cuda-toolkit|nvidia-cuda-nvcc|cuda:", text)
    assert text.index("USER 10001") < text.index("python -m yardstick_llm.engine.server.image_check"), "as the user of the pods"
    assert "yardstick_flashinfer_modules-*.whl" in text
