"""Signals to servers that still import their modules."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from tests.processes import free_port, wait_until
from tests.warm import as_in_production

DEMO = Path(__file__).parents[1] / "engine" / "demo" / "models" / "base"
PROGRAMS = {
    "gateway": ["yardstick_llm.gateway", "--engine", "http://127.0.0.1:9"],
    "engine": ["yardstick_llm.engine", "--model", str(DEMO)],
    "serve": ["yardstick_llm.gateway.cli", "serve", "--model", str(DEMO)],
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("program", "number"), [("gateway", signal.SIGTERM), ("engine", signal.SIGTERM), ("serve", signal.SIGINT)])
def test_a_signal_during_the_imports_ends_a_server_quietly(program: str, number: signal.Signals) -> None:
    command = [sys.executable, "-m", *PROGRAMS[program], "--port", str(free_port())]
    with as_in_production():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: process.poll() is not None or catches(process.pid, signal.SIGTERM), 60, pause=0.001)
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (130 if number == signal.SIGINT else 0, "")
    assert "tokenizers" not in libraries, "it is the gateway that imports them, long before it serves"
    assert "uvloop" not in libraries, "both import it, long before they serve"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_ctrl_c_ends_an_engine_that_loads() -> None:
    """In a terminal, it reaches every process of the group."""
    command = [sys.executable, "-m", *PROGRAMS["engine"], "--port", str(free_port())]
    with as_in_production():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(children.read_text, 60)
    time.sleep(0.4)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert ("Traceback" in output, process.returncode) == (False, 130), output


def catches(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


COMMANDS = {
    "score": ["score", "--query", "a", "--labels", "b", "--items", "FILE", "--url", "URL"],
    "load": ["load", "run", "--rate", "1", "--duration", "60", "--url", "URL"],
    "serve": ["serve", "--model", str(DEMO), "--port", "PORT"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "seconds"), [("score", 0.0), ("score", None), ("load", None), ("serve", 0.0), ("serve", 2.0)])
def test_ctrl_c_ends_a_command_with_130_at_any_time(command: str, seconds: float | None, tmp_path: Path) -> None:
    """Counted from the moment at which the command has set its first handler, before which Python handles signals itself; None:
    once the server is asked, which never answers."""
    (tmp_path / "items.txt").write_text("one\n")
    with as_in_production(), socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        places = {"FILE": str(tmp_path / "items.txt"), "URL": url, "PORT": str(free_port())}
        program = (
            "import signal; from yardstick_llm.gateway.__main__ import yardstick; handle = signal.signal; "
            "signal.signal = lambda *both: (handle(*both), setattr(signal, 'signal', handle), print('began', flush=True)); "
            "yardstick()"
        )
        arguments = [sys.executable, "-c", program, *(places.get(argument, argument) for argument in COMMANDS[command])]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        with closing(silent.accept()[0]) if seconds is None else nullcontext():
            time.sleep(seconds or 0.0)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
    assert ("Traceback" in output, process.returncode) == (False, 0 if "Ready after" in output else 130), output
