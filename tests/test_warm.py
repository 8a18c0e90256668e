"""Programs that a warm process forks differ from others only in how soon they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from gateway.commands.launch import Child
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
        assert b"tests.warm" in Path(f"/proc/{child._process.pid}/cmdline").read_bytes()
    finally:
        child._process.kill()
        child._process.wait()
        child._process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_a_command_has_its_files_and_status(warm: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "score", "--query", "q", "--labels", "a", "--items", "-", "--url", "nowhere"]
    with nullcontext() if warm else as_in_production():
        done = subprocess.run(command, input="an item\n", capture_output=True, text=True, timeout=60, check=False)
        with (tmp_path / "help").open("w") as file:
            subprocess.run([*command[:3], "--help"], stdout=file, timeout=60, check=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--url" in done.stderr
    assert "Usage" in (tmp_path / "help").read_text()
