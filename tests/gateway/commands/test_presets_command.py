"""``yardstick presets``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.presets.preset import builtin


def yardstick(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_presets_are_listed_and_printed() -> None:
    listed = yardstick("presets")
    assert listed.returncode == 0, listed.stderr
    for name in builtin():
        assert f" {name} " in listed.stdout
    assert "…" not in listed.stdout, "a pipe has 80 columns; names are folded, not cut"
    assert yardstick("presets", "zerank-2").stdout == builtin()["zerank-2"]


@pytest.mark.slow
def test_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('name = "own"\ntask = "rerank"\ntemplate = ["{query}"]\n')
    checked = yardstick("presets", str(file))
    assert (checked.returncode, "{document} exactly once" in checked.stderr, len(checked.stderr.splitlines())) == (1, True, 1)
    unknown = yardstick("presets", "nothing")
    assert (unknown.returncode, "name one of" in unknown.stderr) == (1, True)
