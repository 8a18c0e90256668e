"""``python -m tests.shards [WORD ...]``: what tests a GPU, a process for each file, because most time goes into compiling kernels.

Kernels and backends run all their quick tests there, not only those marked ``gpu``: on other machines the interpreter runs them.
After a test that breaks the GPU for its process, ends the process or does not end, another process runs the tests left: this module
is also a plugin of pytest there (``-p tests.shards``), which notes each test that begins in a file, named by the variable
:data:`BEGUN`, and :data:`ENDED` once none is left. With words, only processes run whose names have one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

PROCESSES = 16
"""As many as the reference host has cores."""
TESTS = Path(__file__).parent
BACKENDS = TESTS / "engine/attention/test_backends.py"
BACKEND_PARTS = {"FlashInfer": "flashinfer", "long layouts": "long_layouts", "other": "not flashinfer and not long_layouts"}
"""Expressions for ``-k`` by name. Together these tests take longer than a run may; those of FlashInfer compile the least."""
DEVICE = "device: torch.device"
WHOLE = (
    *(path for path in sorted((TESTS / "kernels").glob("test_*.py")) if DEVICE in path.read_text(encoding="utf-8")),
    TESTS / "engine/test_graphs.py",
    TESTS / "engine/lenvm/test_pass_graphs.py",
)
"""Files whose tests take the device, whichever it is."""
FAILED = ("test_candidates", "test_graphs")
"""Shards with failures in the last run on a GPU: they come first."""
ENGINES = TESTS / "engine/test_gpu_engines.py"
"""A process for each engine, because each compiles kernels of its own."""
ENGINE_NAMES = (
    "adapters beside products in FP8",
    "adapters",
    "heads of 128",
    "experts",
    "keys and values in FP8",
    "products in FP8 with what follows",
    "products in FP8",
    "products with what follows",
    "weights of 4 bits",
    "windows and soft caps",
)
ENGINE_TEST = "test_a_gpu_answers_as_a_cpu_and_compiles_nothing_late"
ENCODER_TEST = "test_encoders_answer_as_on_a_cpu_and_compile_nothing_late"
MARK = "pytest.mark.gpu"
"""Other files are not even collected: a GPU host lacks packages that they import."""
NOTHING_TO_RUN = 5
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "tests.shards")
"""All that tests there need. A GPU host has others, some for older releases of pytest, and their warnings would be errors."""
MOST_PROCESSES = 5
"""Most processes that run the tests of one shard, one after the other."""
TEST_SECONDS = 130
"""Time of one test, its compilations included. A longer one ends its process."""

BEGUN = "YARDSTICK_TESTS_BEGUN"
ENDED = "all have ended"
LOST = 9
"""Exit code of a session whose GPU computes nothing more, as after an illegal access to memory."""

if BEGUN in os.environ and torch.cuda.is_available():
    # Compiling the loops for a CPU takes half a minute, and many processes would do it at once. PyTorch takes their place.
    sys.modules["numba"] = None


def main(words: Sequence[str] = ()) -> int:
    """Run all; each test's line is printed as it ends, with the name of its process. Returns how many processes failed."""
    chosen = {name: given for name, given in shards().items() if not words or any(word in name for word in words)}
    with ThreadPoolExecutor(PROCESSES) as pool:
        ended = dict(zip(chosen, pool.map(run, chosen, chosen.values()), strict=True))
    failed = [name for name, code in ended.items() if code not in (0, NOTHING_TO_RUN)]
    print(f"{len(ended) - len(failed)} of {len(ended)} passed; failed: {', '.join(failed) or 'none'}", flush=True)
    return len(failed)


def shards() -> dict[str, list[str]]:
    """Arguments of pytest by name: :data:`FAILED`, then the longest first."""
    quick = ["-m", "gpu or not slow"]
    whole = {path.stem: [*quick, str(path)] for path in WHOLE}
    found = {name: whole[name] for name in FAILED}
    found |= {f"engine, {name}": ["-m", "gpu", f"{ENGINES}::{ENGINE_TEST}[{name}]"] for name in ENGINE_NAMES}
    found["engine, encoders"] = ["-m", "gpu", f"{ENGINES}::{ENCODER_TEST}"]
    found |= {f"attention, {name}": [*quick, "-k", only, str(BACKENDS)] for name, only in BACKEND_PARTS.items()}
    found["others marked gpu"] = ["-m", "gpu", *map(str, others())]
    return found | whole


def others() -> list[Path]:
    """Files with tests marked ``gpu`` that have no process of their own."""
    found = (path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8"))
    return [path for path in found if path not in (*WHOLE, ENGINES, BACKENDS)]


def run(name: str, arguments: list[str]) -> int:
    """The tests of one shard, in one process if all goes well; returns the first exit code that is not 0, or 0."""
    with tempfile.TemporaryDirectory() as folder:
        begun, codes = Path(folder) / "begun", []
        begun.touch()
        for _ in range(MOST_PROCESSES):
            codes.append(_pytest(name, arguments, begun))
            if begun.read_text(encoding="utf-8").endswith(f"{ENDED}\n"):
                break
            print(f"{name}: ended with exit code {codes[-1]} before its last test", flush=True)
    return next((code for code in codes if code), 0)


def _pytest(name: str, arguments: list[str], begun: Path) -> int:
    """One process; returns its exit code. What it says comes line by line, so that a run that is cut off has said what ended."""
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", *(part for plugin in PLUGINS for part in ("-p", plugin))]
    limit = ["--timeout", f"{TEST_SECONDS}", "--timeout-method", "thread"]  # a signal does not reach a call that waits for the GPU
    command = [sys.executable, "-u", "-m", "pytest", *options, *limit, *arguments]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # as many shards as cores run at once
    environment |= {BEGUN: str(begun), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    source = str(TESTS.parent / "src")  # programs that tests start find the packages, also where they are not installed
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name}: {line.rstrip()}", flush=True)
    return process.returncode


def _begun() -> Path:
    return Path(os.environ[BEGUN])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = set(_begun().read_text(encoding="utf-8").splitlines())
    out = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=out)


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End the session where a test failed and nothing works on the GPU any more."""
    if report.failed and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"the GPU computes nothing more: {error}", LOST)


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        _note(ENDED)


def _note(line: str) -> None:
    with _begun().open("a", encoding="utf-8") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
