"""``python -m benchmarks`` and ``yardstick bench``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "aiohttp", "triton", "msgspec")


def yardstick_bench(packages: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``yardstick bench`` in ``cwd``, from the packages that are in the folder ``packages``."""
    command = [sys.executable, "-P", "-m", "yardstick_llm.gateway.cli", "bench", *arguments]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_list_names_every_benchmark_and_imports_none() -> None:
    program = f"""
import sys
from benchmarks.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    *listed, last = done.stdout.splitlines()
    assert last.strip() == "imported:"
    assert [line.split()[0] for line in listed if line.startswith("  ")][-len(BENCHMARKS) :] == list(BENCHMARKS)


@pytest.mark.slow
def test_yardstick_bench_runs_the_checkouts_benchmarks_from_any_folder(tmp_path: Path) -> None:
    decoy = tmp_path / "benchmarks"
    decoy.mkdir()
    (decoy / "__main__.py").write_text("print('decoy')")
    done = yardstick_bench(ROOT / "src", tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: python -m benchmarks" in done.stdout


@pytest.mark.slow
def test_yardstick_bench_of_an_installed_package_names_the_checkout(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src" / "yardstick_llm", tmp_path / "yardstick_llm", ignore=shutil.ignore_patterns("__pycache__", "demo")
    )
    done = yardstick_bench(tmp_path, ROOT, "score")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "yardstick: the benchmarks are not in the installed package; run `python -m benchmarks` in a checkout of the source\n"
    )
