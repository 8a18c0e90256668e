"""Environments with pinned clients, made on first use and kept in ``.venv/clients``.

The name of an environment contains the hash of its pins, so a changed pin makes a new one. Clients run in processes of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from tests.parts import need

PINS = Path(__file__).parent / "pins"
SCRIPTS = Path(__file__).parent / "scripts"
DATA = Path(__file__).parent / "tasks"
"""The current directory of Python clients: lm-eval's tasks name their data relative to it."""
ROOT = Path(sys.prefix) / "clients"
INSTALL_SECONDS, PROBE_SECONDS, RUN_SECONDS = 500, 30, 100
SHARED = "# with the packages of .venv"
"""First line of the pins of an environment that imports from ``.venv`` what it lacks, so that torch is not installed twice."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
"""Clients call no other server than the tested one."""
MISSING = ("No matching distribution found", "ETARGET", "E404")
"""Errors of pip and npm where an index, such as a mirror, lacks a package."""
ONE_BY_ONE = """
import contextlib, io, json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(printed.getvalue().splitlines()[-1])
"""
"""A program that runs scripts, each of which prints JSON in its last line."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1"]


def run_client(script: str, *arguments: str, environment: str = "", seconds: float = RUN_SECONDS, **variables: str) -> Any:
    """Run ``scripts/<script>`` with ``arguments`` and return the JSON of the last line that it prints.

    ``environment`` is the name of a file in ``pins``; default: the name of the script up to its first underscore. ``variables`` are
    environment variables.
    """
    path = SCRIPTS / script
    name = environment or path.stem.partition("_")[0]
    if path.suffix == ".mjs":
        directory = node_environment(name)
        command = ["node", "--input-type=module", "-"]  # from standard input, packages are looked up in the current directory
    else:
        directory = DATA
        command = [str(python_environment(name) / "bin" / "python"), "-I", "-W", "ignore", str(path)]
    return json.loads(run([*command, *arguments], directory, path, seconds, variables).splitlines()[-1])


def run_together(environment: str, *runs: tuple[str, ...], seconds: float = RUN_SECONDS, **variables: str) -> list[Any]:
    """Return the result of :func:`run_client` for each of ``runs``, a Python script and its arguments. They share one process,
    because importing a client takes most of the time of a run; without a name of an ``environment``, one of ``.venv``."""
    python = str(python_environment(environment) / "bin" / "python") if environment else sys.executable
    scripts = [[str(SCRIPTS / script), *arguments] for script, *arguments in runs]
    command = [python, "-I", "-W", "ignore", "-c", ONE_BY_ONE, json.dumps(scripts)]
    return [json.loads(line) for line in run(command, DATA, Path(os.devnull), seconds, variables).splitlines()[-len(runs) :]]


def run_shell(script: str, *arguments: str, environment: str, seconds: float = RUN_SECONDS, **variables: str) -> str:
    """Run ``scripts/<script>`` with the programs of an environment, and return what it prints."""
    path = SCRIPTS / script
    programs = {"PATH": f"{python_environment(environment) / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return run(["sh", "-eu", str(path), *arguments], DATA, path, seconds, programs | variables)


def run(command: list[str], directory: Path, stdin: Path, seconds: float, variables: dict[str, str]) -> str:
    """Return the output of ``command``. Fails the test with the command's errors if the command fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "YARDSTICK"))}
    with stdin.open() as source:
        ended = subprocess.run(
            command,
            stdin=source,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=directory,
            env=kept | OFFLINE | variables,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def python_environment(name: str) -> Path:
    """The virtual environment with the packages of ``pins/<name>.txt``, without their dependencies. Those that ``.venv`` has in the
    same versions are linked, the others installed."""
    text = (PINS / f"{name}.txt").read_text(encoding="utf-8")

    def install(directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=INSTALL_SECONDS)
        site = next((directory / "lib").glob("python*/site-packages"))
        if text.startswith(SHARED):
            (site / "shared.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        if others := link_installed([line for line in text.splitlines() if not line.startswith("#")], site):
            python = str(directory / "bin" / "python")
            options = ["--quiet", "--no-deps", "--ignore-installed", "--no-compile", *others]
            download([*PIP, "--python", python, "install", *options], [*PIP, "index", "versions", "pip"])

    return ready(name, text.encode() + sys.version.encode(), install)


def link_installed(pins: list[str], site: Path) -> list[str]:
    """Link the packages that this interpreter has in the pinned versions into the folder ``site``, and return the other pins.

    Each file is a hard link, so that pip, which replaces files and follows links to folders, cannot change ``.venv``.
    """
    others = []
    for pin in pins:
        package, _, version = pin.partition("==")
        found = next(iter(metadata.distributions(name=package)), None)
        if found is None or found.version != version:
            others.append(pin)
            continue
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            compiled = Path(cache_from_source(str(source)))
            if file.parts[0] != ".." and file.suffix != ".pyc":
                link(source, site / file)
                if file.suffix == ".py" and compiled.exists():
                    link(compiled, site / file.parent / "__pycache__" / compiled.name)
    return others


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.hardlink_to(source)


def node_environment(name: str) -> Path:
    """A directory whose ``node_modules`` has the package that ``pins/<name>.npm`` names; skips the test without Node.js."""
    need("node")
    pin = (PINS / f"{name}.npm").read_text(encoding="utf-8").split()

    def install(directory: Path) -> None:
        command = [need("npm"), "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), *pin]
        directory.mkdir()
        download(command, [command[0], "ping"])

    return ready(name, " ".join(pin).encode(), install)


def download(command: list[str], probe: list[str]) -> None:
    """Run ``command``, which installs packages. If it fails, skip the test if ``probe``, which only asks the index, fails too."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if ended.returncode != 0:
        try:
            reached = subprocess.run(probe, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            reached = False
        if not reached:
            pytest.skip(f"the package index cannot be reached: {' '.join(probe)} fails")
        if any(words in ended.stderr for words in MISSING):
            pytest.skip(f"this package index lacks a pinned package: {ended.stderr.strip().splitlines()[-1]}")
        pytest.fail(ended.stderr[-4000:])


def ready(name: str, pins: bytes, install: Callable[[Path], None]) -> Path:
    """The directory of an environment, made by ``install`` if it is missing or was not finished."""
    directory = ROOT / f"{name}-{hashlib.sha256(pins).hexdigest()[:12]}"
    done = directory / ".ready"
    ROOT.mkdir(exist_ok=True)
    with locked(directory.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            install(directory)
            done.touch()
    return directory


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, because tests run in several processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
