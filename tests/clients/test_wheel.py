"""The wheel installs one top-level package, and works beside packages of PyPI with the names of this project's folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import PIP, download, python_environment
from tests.processes import free_port, wait_until
from tests.warm import as_in_production

ROOT = Path(__file__).parents[2]
SECONDS = 120
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import yardstick_llm
names = [module.name for module in pkgutil.walk_packages(yardstick_llm.__path__, "yardstick_llm.")]
for name in names:
    if not name.endswith(("__main__", ".image_check")):
        importlib.import_module(name)
import kernels, tracing, transformers
print(json.dumps({"count": len(names), **{module.__name__: module.__file__ for module in (yardstick_llm, kernels, tracing)}}))
"""
"""Imports every module of the wheel, and then the other packages."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    download([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], [*PIP, "index", "versions", "pip"])
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> tuple[Path, dict[str, str]]:
    """The interpreter of an environment with both other packages, and the variables with which it also has the wheel."""
    site = wheel.parent / "site"
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "YARDSTICK"))}
    python, variables = python_environment("wheel") / "bin" / "python", kept | {"PYTHONPATH": str(site)}
    ours, theirs = ROOT / "kernels", site / "yardstick_llm" / "kernels"
    shutil.copy2(ours / "native.py", theirs)  # with its time, by which Numba finds the loops that `make setup` has compiled
    shutil.copytree(ours / "__pycache__", theirs / "__pycache__", dirs_exist_ok=True)
    return python, variables


@pytest.mark.slow
def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()}
        data = {Path(name).suffix for name in files.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"yardstick_llm"}
    assert {".toml", ".html", ".js", ".css", ".svg", ".safetensors"} <= data


@pytest.mark.slow
def test_every_module_is_imported_beside_packages_of_the_same_names(
    installed: tuple[Path, dict[str, str]], wheel: Path, tmp_path: Path
) -> None:
    python, variables = installed
    command = [str(python), "-W", "ignore", "-c", IMPORT_ALL]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] > 100
    assert Path(found["yardstick_llm"]).is_relative_to(wheel.parent)
    for other in ("kernels", "tracing"):
        assert Path(found[other]).is_relative_to(python.parents[1]), other


@pytest.mark.slow
@pytest.mark.parametrize("command", ["yardstick", "yardstick-llm"])
def test_the_command_has_two_names(installed: tuple[Path, dict[str, str]], command: str, tmp_path: Path) -> None:
    python, variables = installed
    program = [str(python), str(Path(variables["PYTHONPATH"], "bin", command)), "presets"]
    done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert "qwen3-reranker" in done.stdout


@pytest.mark.slow
def test_gateway_and_engine_serve_from_the_wheel(installed: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """The command is the module."""
    python, variables = installed
    port = free_port()
    command = [str(python), "-W", "ignore", "-m", "yardstick_llm", "serve", "--port", str(port)]
    with as_in_production(), (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def ready() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(ready, SECONDS, pause=0.2)
            answer = client.post("/v1/score", json={"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]})
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["scores"]) == 2
    finally:
        process.terminate()
        process.wait(60)
