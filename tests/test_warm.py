"""Programs that a warm process forks differ from others only in how soon they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from gateway.commands.processes import Child
from tests.gateway.commands.test_cli_serve import parent_of
from tests.processes import Program, free_port, wait_until
from tests.warm import as_in_production

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs start warm on Linux only")


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_program_is_a_child_of_the_test(warm: bool) -> None:
    with nullcontext() if warm else as_in_production():
        program = Program("gateway", "--engine", "http://127.0.0.1:9")
    try:
        proc = Path(f"/proc/{program.process.pid}")
        assert (b"tests.warm" in (proc / "cmdline").read_bytes()) == warm
        assert parent_of(proc / "stat") == os.getpid()
        assert program.process.stderr.readline().endswith(f"listening at {program.url}\n")
        wait_until(lambda: "startup complete" in program.process.stderr.readline())
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(20) == 0
    finally:
        program.close()


def test_programs_of_a_command_start_warm() -> None:
    """Those of ``yardstick serve`` and of offline runs, which end with their parent."""
    child = Child("gateway", ["gateway", "--port", str(free_port()), "--engine", "http://127.0.0.1:9"])
    try:
        assert b"tests.warm" in Path(f"/proc/{child.process.pid}/cmdline").read_bytes()
    finally:
        child.process.kill()
        child.process.wait()
        child.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_a_command_has_its_files_and_status(warm: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "score", "--query", "q", "--labels", "a", "--items", "-", "--url", "nowhere"]
    with nullcontext() if warm else as_in_production():
        done = subprocess.run(command, input="an item\n", capture_output=True, text=True, timeout=60, check=False)
        with (tmp_path / "help").open("w") as file:
            subprocess.run([*command[:3], "--help"], stdout=file, timeout=60, check=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--url" in done.stderr
    assert "Usage" in (tmp_path / "help").read_text()


def test_what_cannot_be_imported_fails_the_parallel_tests(tmp_path: Path) -> None:
    """Workers are forks of a process that has met the error, and report it all the same."""
    broken = {"test_broken.py": "raise ValueError('a file')", "inner/__init__.py": "raise ValueError('a package')"}
    for name, text in {**broken, "inner/test_in_it.py": "def test(): pass", "test_well.py": "def test(): pass"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "__init__.py").touch()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n2",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout
    assert all(f"ValueError: {what}" in done.stdout for what in ("a file", "a package")), done.stdout
    assert "1 passed" in done.stdout
