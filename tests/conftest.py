"""Where there is no GPU, kernels run in Triton's interpreter, on tensors of the CPU.

Whether they do is settled when Triton and a kernel's module are imported, so all are imported here, before anything else imports
them. The environment is put back, because tests start processes that would inherit it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import httpx
import hypothesis
import pytest
import torch

from tests import warm
from tests.parts import required
from yardstick_llm import kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
CLUSTER = Path(__file__).parent / "cluster"
"""Folder whose tests are all marked ``cluster``."""
ALONE = [Path(__file__).parent / "attacks", CLUSTER]
"""Folders whose tests load the machine and measure what that does to others; all of them are marked ``alone``."""
BESIDE_OTHERS = [
    Path(__file__).parent / "attacks" / name
    for name in ("test_admission.py", "test_http_edge.py", "test_isolation.py", "test_soak.py")
]
"""Files in those folders whose tests count rather than measure; the few that measure are marked there. A soak measures latency only
where it is asked to last for minutes."""
LONG = [
    Path(__file__).parent / path
    for path in (
        "gateway/console",
        "clients",
        "examples",
        "kernels/test_compiling.py",
        "attacks/test_soak.py",
        "test_lenvm_end_to_end.py",
        "test_wheelhouse.py",
        "benchmarks",
        "kernels/test_branch_attention.py",
        "gateway/commands",
        "engine/test_structured.py",
        "engine/vision",
    )
]
"""Folders and files with tests of half a minute or more: if they came last, other processes would have nothing left to do."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Examples have no deadline: beside other tests, a thread may not run for longer than any example takes.
hypothesis.settings.register_profile("whole", deadline=None)
hypothesis.settings.register_profile("quick", max_examples=20, deadline=None)  # for `make test`; the default is 100
hypothesis.settings.register_profile("deep", max_examples=1000, deadline=None)  # by hand; see also tests/engine/depth.py
hypothesis.settings.load_profile("whole")

if DEVICE == "cpu" and HAS_TRITON:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        for module in pkgutil.iter_modules(kernels.__path__):
            if not module.ispkg:
                importlib.import_module(f"yardstick_llm.kernels.{module.name}")
        importlib.import_module("triton.experimental.gluon")  # the first launch would import it, without the setting
        importlib.import_module("tests.interpreter").speed_up()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU in the interpreter."""
    return torch.device(DEVICE)


@pytest.fixture(autouse=True, scope="session")
def warm_programs() -> None:
    """Gateways, engines and commands that tests start have imported their modules already."""
    if sys.platform == "linux":
        warm.enable()


@pytest.fixture(scope="module")
def as_in_production() -> Iterator[None]:
    """Programs that the tests of a module start import their modules themselves."""
    with warm.as_in_production():
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_tls() -> Iterator[None]:
    """HTTP clients in this process share their TLS contexts. Each would take 30 ms to read the certificate authorities."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two runs can share the tests: the second leaves out what the first has run."""
    parser.addoption("--outcomes", type=Path, help="append the ids of tests that run and the reasons why others are skipped")
    parser.addoption("--except", type=Path, dest="before", help="leave out the tests that ran according to this file of --outcomes")


class Outcomes:
    """Writes the file of ``--outcomes``: lines ``ran<tab>ID`` and ``skipped<tab>REASON``."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            print("skipped", report.longrepr[2].removeprefix("Skipped: "), sep="\t", file=self._file)
        elif report.when == "call" and "hypothesis" not in report.keywords:  # which another run may give more examples
            print("ran", report.nodeid, sep="\t", file=self._file)

    def pytest_unconfigure(self) -> None:
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    """Check ``REQUIRE``, record outcomes, and fork the workers that pytest-xdist is about to start."""
    required()
    if config.option.outcomes and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.option.outcomes))
    if config.getoption("tx", None) and not config.option.collectonly and sys.platform == "linux":
        importlib.import_module("tests.forked_workers").enable(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which ``scripts/test.sh`` selects nothing: imports take most of the time of a collection."""
    chosen = config.option.markexpr
    if "not cluster" in chosen and collection_path == CLUSTER:
        return True
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    text, all_alone = collection_path.read_text(), _is_alone(collection_path)
    left_out = "not slow" in chosen and re.search(r"^pytestmark = .*mark\.slow", text, re.M)
    if chosen.startswith("not alone and"):
        left_out = left_out or all_alone
    elif chosen.startswith("waits and"):
        left_out = left_out or "mark.waits" not in text
    elif chosen.startswith("alone and"):
        left_out = left_out or not (all_alone or "mark.alone" in text)
    return bool(left_out) or None


def pytest_collection_finish() -> None:
    """Freeze the objects that all tests share, so that the garbage collector does not scan them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def leaks() -> Iterator[None]:
    """Sockets, files and coroutines that a module forgets are errors of this module, rather than of whatever runs much later.

    What a module leaves in use is not looked through again: tests with parameters of the session run module by module for each.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Skip tests marked ``gpu`` where there is no GPU, mark the tests in ``ALONE``, and order those that are selected."""
    if config.option.before:
        ran = {line.removeprefix("ran\t") for line in config.option.before.read_text().splitlines()}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ran])
        items[:] = [item for item in items if item.nodeid not in ran]
    for item in items:
        if _is_alone(item.path):
            item.add_marker("alone")
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    yield
    items[:] = _long_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _long_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return ``items`` in an order of which pytest-xdist gives each process an equal part (``--dist worksteal``). Each part begins
    with the tests of some elements of :data:`LONG`, which stay together."""
    groups: list[list[pytest.Item]] = [[] for _ in [*LONG, None]]
    for item in items:
        groups[_place(item.path)].append(item)
    others, ordered = groups.pop(), list[pytest.Item]()
    for process in range(processes):
        part = [item for group in groups[process::processes] for item in group]
        room = max(0, (len(items) - len(ordered)) // (processes - process) - len(part))
        part, others = part + others[:room], others[room:]
        ordered += part
    return ordered + others


@cache  # because comparing paths takes longer than anything else in a collection
def _place(file: Path) -> int:
    """The element of :data:`LONG` that has the tests of ``file``; its length for other files."""
    return next((place for place, path in enumerate(LONG) if path in (file, *file.parents)), len(LONG))


@cache
def _is_alone(file: Path) -> bool:
    return file not in BESIDE_OTHERS and any(folder in file.parents for folder in ALONE)
