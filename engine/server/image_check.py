"""Check of an engine's image, run when it is built: ``python -m yardstick_llm.engine.server.image_check cpu|cuda [MIB]``.

Every module of the engine is imported, the loops that the image brings along (``YARDSTICK_LOOPS``) must not be compiled again, and
the environment must not be larger than its budget. For CUDA, the C compiler must build
an extension of Python, as Triton does for its launchers, and FlashInfer's compiled modules must load. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from numba.core.dispatcher import Dispatcher

from yardstick_llm.kernels.runtime import loops

PACKAGES = ("yardstick_llm.engine", "yardstick_llm.kernels")
BUDGETS = {"cpu": 1100, "cuda": 5600}
"""Largest size of the environment in MiB."""
EXTENSION = "#include <Python.h>\nPyMODINIT_FUNC PyInit_check(void) { return NULL; }\n"


def main() -> int:
    """Print what was checked; returns the exit status."""
    variant, *budget = sys.argv[1:]
    print(f"{check_loops()} loops are compiled, {import_all()} modules imported")
    if variant == "cuda":
        check_cuda()
    most, used = int(budget[0]) if budget else BUDGETS[variant], size_of(Path(sys.prefix))
    print(f"{sys.prefix} has {used} MiB of at most {most}")
    return 0 if used <= most else 1


def size_of(folder: Path) -> int:
    """MiB of the files in ``folder``."""
    return sum(file.lstat().st_size for file in folder.rglob("*")) >> 20


def check_loops() -> int:
    """Load the loops as an engine does; returns their number. Raises AssertionError if Numba has to compile one again."""
    found = [each.stats for each in vars(loops()).values() if isinstance(each, Dispatcher)]
    assert not any(each.cache_misses for each in found), "the image's loops were compiled for other sources"
    return sum(len(each.cache_hits) for each in found)


def import_all() -> int:
    """Import every module of the engine except its programs; returns their number."""
    names = [module.name for package in PACKAGES for module in pkgutil.walk_packages([str(_folder(package))], f"{package}.")]
    names = [name for name in names if not name.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    return len(names)


def check_cuda() -> None:
    """Check what only the variant for GPUs has. Raises an exception that names what is missing."""
    import torch
    import triton

    from yardstick_llm.engine.runner.attention.flashinfer import VERSION

    assert torch.version.cuda, f"torch {torch.__version__} is without CUDA"
    assert metadata.version("flashinfer-python") == VERSION, f"the engine needs FlashInfer {VERSION}"
    compile_extension(Path(sysconfig.get_path("include")))
    loaded = load_modules(_folder("flashinfer") / "data" / "aot")
    print(f"torch {torch.__version__}, triton {triton.__version__}, FlashInfer {VERSION} with {loaded} compiled modules")


def compile_extension(headers: Path) -> None:
    """Compile an extension of Python. Raises CalledProcessError without compiler or ``headers``."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "check.so")
        command = ["gcc", "-shared", "-fPIC", f"-I{headers}", "-x", "c", "-", "-o", out]
        subprocess.run(command, input=EXTENSION, text=True, check=True)  # noqa: S603


def load_modules(folder: Path) -> int:
    """Load each compiled module in ``folder``; returns their number. Raises OSError where one needs a missing library."""
    files = sorted(folder.glob("*/*.so"))
    for file in files:
        ctypes.CDLL(str(file))
    return len(files)


def _folder(package: str) -> Path:
    return Path(str(importlib.import_module(package).__file__)).parent


if __name__ == "__main__":
    sys.exit(main())
