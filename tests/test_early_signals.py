"""Signals to servers that still import their modules."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port, wait_until
from tests.warm import as_in_production

DEMO = Path(__file__).parents[1] / "engine" / "demo" / "models" / "base"
PROGRAMS = {
    "gateway": ["gateway", "--engine", "http://127.0.0.1:9"],
    "engine": ["engine", "--model", str(DEMO)],
    "serve": ["gateway.cli", "serve", "--model", str(DEMO)],
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_during_the_imports_ends_a_server_quietly(program: str, number: signal.Signals) -> None:
    command = [sys.executable, "-m", *PROGRAMS[program], "--port", str(free_port())]
    with as_in_production():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: process.poll() is not None or catches(process.pid, signal.SIGTERM), 60, pause=0.001)
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")
    assert "tokenizers" not in libraries, "it is the gateway that imports them, long before it serves"
    assert "zmq" not in libraries, "it is the engine that imports it, long before it serves"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)
