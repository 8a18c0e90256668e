"""The Makefile, the pins, CI's script, and what that script starts where it can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(*arguments: str, directory: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, env=clean | environment, capture_output=True, text=True, timeout=60, check=False)


def serve_line(*arguments: str, **environment: str) -> str:
    (line,) = [line for line in make("-n", "serve", *arguments, **environment).stdout.splitlines() if "yardstick serve" in line]
    return " ".join(line.split())


def test_help_lists_every_target() -> None:
    listed = set(re.findall(r"^  make ([a-z-]+) ", make("help").stdout, flags=re.M))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert phony
    assert listed == set(phony[1].split())


def test_serve_passes_on_what_was_given() -> None:
    assert serve_line() == ".venv/bin/yardstick serve"
    assert serve_line("PORT=9000", "MODEL=Qwen/Qwen3-0.6B") == ".venv/bin/yardstick serve --model Qwen/Qwen3-0.6B --port 9000"
    assert serve_line("FLAGS=--max-tokens-in-cache 5") == ".venv/bin/yardstick serve --max-tokens-in-cache 5"


def test_serve_takes_no_host_from_the_shell() -> None:
    assert serve_line(HOST="laptop", PORT="1") == ".venv/bin/yardstick serve"


@pytest.mark.parametrize(("version", "found"), [("(3, 10)", "3.10.4"), (None, "missing")])
def test_a_python_too_old_is_one_line(tmp_path: Path, version: str | None, found: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    if version is not None:
        python.write_text(f'#!/bin/sh\ncase "$2" in *print*) echo {found};; *) exit 1;; esac\n')
        python.chmod(0o755)
    done = make("setup", f"PYTHON={python}", directory=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert f"needs Python 3.11 or newer, and {python} is {found}" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_second_start_installs_nothing(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    assert "pip install" not in make("-n", "serve", directory=tmp_path).stdout
    (tmp_path / "constraints.txt").touch()
    os.utime(tmp_path / ".venv" / ".ready", (0, 0))
    assert "pip install" in make("-n", "serve", directory=tmp_path).stdout, "new pins are installed"


def test_without_redis_the_quick_tests_say_what_they_leave_out() -> None:
    with_redis, without = (make("-n", "test", f"HAS_REDIS={found}").stdout for found in ("redis-server", ""))
    assert "not redis" not in with_redis
    assert "Left out" not in with_redis
    assert "and not redis" in without
    assert "Left out: the tests that need a real Redis" in without
    assert "not redis" not in make("-n", "test-all", "HAS_REDIS=").stdout


def pins(lines: list[str]) -> dict[str, str]:
    found = (re.match(r"([\w.-]+)==([\w.]+)", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def test_the_pins_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = pins([*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)])
    constraints = pins((ROOT / "constraints.txt").read_text().splitlines())
    assert "torch" not in constraints
    assert {name: version for name, version in direct.items() if name != "torch"}.items() <= constraints.items()
    assert "+" not in (ROOT / "constraints.txt").read_text(), "a local version cannot be installed elsewhere"


def test_ci_runs_what_everybody_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.search(r"^make check \|\| again ", script.read_text(), flags=re.M)
    checks = make("-n", "check").stdout
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"):
        assert tool in checks


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Programs in the place of those that change a machine; all of them do nothing, and succeed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("make", "docker", "dockerd", "containerd", "debootstrap", "iptables", "ip", "openssl", "curl", "kubectl", "sleep"):
        pretend(tools, name, "")
    pretend(tools, "id", "echo 0")
    pretend(tools, "cluster", TOLD)
    return tools


def pretend(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/bash\n{script}\n")
    (tools / name).chmod(0o755)


def on(tools: Path, script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": f"{tools}:{os.environ['PATH']}", "LOG": f"{tools}/log", "DONE": f"{tools}/done", **environment}
    return subprocess.run([script], env=given, capture_output=True, text=True, timeout=60, check=False)


LOCAL = ROOT / "tests" / "cluster" / "local.sh"
TOLD = 'echo "$1" >>"$DONE"'
REFUSES = 'then echo "operation not permitted" >&2; exit 1; fi'
CANNOT = {
    "it takes root": {"id": "echo 1000"},
    "dockerd does not start": {"docker": "exit 1", "dockerd": f"if true; {REFUSES}"},
    "cluster up` fails": {"cluster": f'{TOLD}; if [ "$1" = up ]; {REFUSES}'},
    "its node takes no image": {"cluster": f'{TOLD}; if [ "$1" = load-image ]; {REFUSES}'},
    "pods do not start": {"kubectl": f'if [ "$1" = wait ]; {REFUSES}'},
    "Services cannot be reached": {"curl": "exit 7"},
}


@pytest.mark.parametrize("reason", CANNOT)
def test_a_machine_that_can_run_no_cluster_is_no_failure_but_a_reason(machine: Path, reason: str) -> None:
    for name, script in CANNOT[reason].items():
        pretend(machine, name, script)
    done = on(machine, LOCAL, CLUSTER=str(machine / "cluster"))
    assert done.returncode == 3, done.stderr
    *said, last = done.stderr.splitlines()
    assert last.startswith("No cluster can run on this machine: ")
    assert reason in last
    assert ("operation not permitted" in said) == any(REFUSES in script for script in CANNOT[reason].values())
    calls = (machine / "done").read_text().split() if (machine / "done").exists() else []
    assert calls[-1:] == ["down"] * ("up" in calls), "what was started is stopped"


def test_images_that_cannot_be_built_and_tests_that_fail_are_failures(machine: Path) -> None:
    pretend(machine, "make", "exit 2")
    done = on(machine, LOCAL, CLUSTER=str(machine / "cluster"))
    assert done.returncode == 2
    assert "No cluster" not in done.stderr
    assert (machine / "done").read_text().split() == ["up", "kubeconfig", "load-image", "down"]


@pytest.mark.parametrize(("status", "words"), [(0, ""), (3, "left out, because no cluster can run"), (2, "CLUSTER TESTS FAILED")])
def test_ci_tells_what_became_of_the_cluster_tests(machine: Path, status: int, words: str) -> None:
    for name in (".ci/run", "tests/cluster/local.sh"):
        (machine.parent / name).parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", machine.parent / ".ci")
    pretend(machine.parent / "tests" / "cluster", "local.sh", f"exit {status}")
    for name in ("redis-server", "python3"):
        pretend(machine, name, "")
    pretend(machine, "make", "! env | grep YARDSTICK_")
    done = on(machine, machine.parent / ".ci" / "run", YARDSTICK_CLUSTER=str(machine / "cluster"))
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert ("left out" in done.stdout, "FAILED" in done.stdout) == (status == 3, status == 2)
