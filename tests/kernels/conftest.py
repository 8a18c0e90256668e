"""Each test draws the same numbers every time. Where there is no Triton, as on macOS, only the references are tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import HAS_TRITON


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Bounds on errors are statistics, which one set of random numbers in some hundred misses."""
    torch.manual_seed(0)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The kernels' own tests need Triton to be imported at all."""
    return None if HAS_TRITON or collection_path.name == "test_references.py" else collection_path.is_file()
