"""The runner of the tests on a GPU host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shards
from tests.engine import test_gpu_engines
from tests.gpu_session import LOST
from tests.shards import ENGINE_NAMES, ENGINE_TEST, MARK, TESTS, WHOLE

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
    assert set(ENGINE_NAMES) == set(test_gpu_engines.ENGINES)
    assert hasattr(test_gpu_engines, ENGINE_TEST)


def test_flashinfer_is_tested_from_the_beginning() -> None:
    """A GPU host's time may end before the last shards."""
    first = list(shards.shards())[: shards.PROCESSES]
    assert {"attention, FlashInfer", "attention, long layouts", "others marked gpu"} < set(first)
    assert set(shards.others()).isdisjoint({shards.BACKENDS, shards.ENGINES, *WHOLE})


@pytest.mark.slow
def test_each_test_of_backends_is_in_one_shard() -> None:
    def collected(*only: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *only, str(shards.BACKENDS)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [line for line in said.splitlines() if "::" in line]

    parts = [test for only in shards.BACKEND_PARTS.values() for test in collected("-k", only)]
    assert sorted(parts) == sorted(collected())


BROKEN = """
import os, time, pytest, torch

THREADS = torch.get_num_threads()

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_first():
    assert THREADS == 1

def test_that_ends_the_process():
    os._exit(3)

def test_that_fails():
    assert False

def test_that_breaks_the_gpu(monkeypatch):
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = lost
    lost()

def test_without_end():
    time.sleep(60)

@pytest.mark.parametrize("name", ["a name", "another"])
def test_last(name):
    pass
"""


@pytest.mark.slow
def test_the_tests_behind_one_that_breaks_the_gpu_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In other processes, also behind one that ends its process, and one that does not end. Plugins of the host are not loaded; the
    one here cannot be."""
    (tmp_path / "test_broken.py").write_text(BROKEN)
    monkeypatch.setattr(shards, "TEST_SECONDS", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plugin = tmp_path / "site" / "old-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[pytest11]\nold = no_such_plugin\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugin.parent), str(ROOT)]))
    assert shards.run("broken", [str(tmp_path / "test_broken.py")]) == 3
    said = capsys.readouterr().out
    ends = [said.count(f"ended with exit code {code} before its last test") for code in (3, LOST, 1)]
    assert ends == [1, 1, 1], said
    assert said.count("Exit: the GPU computes nothing more: CUDA error: an illegal memory access") == 1
    for name, end in {
        "test_first": "PASSED",
        "test_that_fails": "FAILED",
        "test_that_breaks_the_gpu": "FAILED",
        "test_last[a name]": "PASSED",
        "test_last[another]": "PASSED",
    }.items():
        assert len(re.findall(re.escape(f"::{name} {end}"), said)) == 1, (name, said)


def test_the_debug_mode_of_waits_is_set_in_one_place() -> None:
    """torch warns of it at its first use, and warnings are errors in tests, so all use ``no_waiting``, which ignores that one."""
    found = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py") if "set_sync_debug_" + "mode" in path.read_text()}
    assert found == {"engine/device.py"}
