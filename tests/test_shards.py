"""The runner of the tests on a GPU host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shards import MARK, TESTS, WHOLE

ROOT = Path(__file__).parents[1]
FILE = """
import pathlib, time

def test_first():
    pass

def test_second():
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_test_is_reported_when_it_ends(tmp_path: Path) -> None:
    """The run may be cut off at any moment, and what has ended is known then."""
    (tmp_path / "test_two.py").write_text(FILE)
    program = f"import sys; from tests.shards import run; sys.exit(run('two', [{str(tmp_path / 'test_two.py')!r}]))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "test_first PASSED" in line:
                break
        else:
            raise AssertionError("the first test was not reported")
        assert line.startswith("two: ")
        (tmp_path / "go").touch()
        assert "test_second PASSED" in process.stdout.read()
    assert process.returncode == 0


def test_every_file_with_gpu_tests_is_run() -> None:
    marked = {path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text()} - {Path(__file__)}
    assert {path for path in marked if MARK not in path.read_text()} == set()
    assert all(path.is_file() for path in WHOLE)
