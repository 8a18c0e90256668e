"""The benchmarks of the kernels import Triton, so their tests are not collected where there is none, as on macOS."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import HAS_TRITON


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if HAS_TRITON else collection_path.is_file()
