"""A pytest plugin for a GPU host (``-p tests.gpu_session``): one test that breaks the GPU or never ends does not cost the others.

A file, named by the variable :data:`BEGUN`, has the tests that have begun, and :data:`ENDED` once none is left. Tests in it are not
run again. A session whose GPU computes nothing more, as after an illegal access to memory, ends with the exit code :data:`LOST`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

BEGUN = "YARDSTICK_TESTS_BEGUN"
ENDED = "all have ended"
LOST = 9


def _begun() -> Path:
    return Path(os.environ[BEGUN])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that have begun."""
    known = set(_begun().read_text(encoding="utf-8").splitlines())
    out = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=out)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note a test before it runs."""
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
    """Note that no test is left."""
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        _note(ENDED)


def _note(line: str) -> None:
    with _begun().open("a", encoding="utf-8") as file:
        file.write(line + "\n")
