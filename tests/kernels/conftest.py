"""Where there is no GPU, the kernels of these tests run in Triton's interpreter, on tensors of the CPU.

Whether they do is settled when a kernel's module is imported, and tests collected earlier may have imported it without. So the
modules are executed again here, in place: functions that others hold see what their module now has. The environment is put back
because tests start processes that inherit it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

import kernels


def _import_kernels() -> None:
    """Whatever a kernel takes from another module is interpreted once that module is: the second round sees to it."""
    names = [f"kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__) if not module.ispkg]
    for name in ["kernels.runtime", *names, *names]:
        if name in sys.modules:
            importlib.reload(sys.modules[name])
        else:
            importlib.import_module(name)


HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu" and HAS_TRITON:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        _import_kernels()
        importlib.import_module("triton.experimental.gluon")  # the first launch would import it, without the setting


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU in the interpreter."""
    return torch.device(DEVICE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where there is no Triton, as on macOS, only the references are tested."""
    return None if HAS_TRITON or collection_path.name == "test_references.py" else collection_path.is_file()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none."""
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu") and "tests/kernels/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
