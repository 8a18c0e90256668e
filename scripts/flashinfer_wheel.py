"""Pack compiled modules of FlashInfer as a wheel: ``python scripts/flashinfer_wheel.py ZIP FOLDER``. Prints the wheel's path.
``python scripts/flashinfer_wheel.py --compile FOLDER`` compiles them and prints the path of the ZIP.

ZIP is named ``flashinfer-VERSION-aot-TARGET.zip``, such as ``flashinfer-0.6.6-aot-sm90a-cu130.zip``, and has ``aot/NAME/NAME.so``
for each module. The wheel puts them where FlashInfer of that version looks for them: ``flashinfer/data/aot`` beside its own files.
With them, nothing is compiled at a start.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

NAME = "yardstick_flashinfer_modules"
TAG = "py3-none-manylinux_2_28_x86_64"
FILE = re.compile(r"flashinfer-(?P<version>\d+(?:\.\d+)+)-aot-(?P<target>\w+(?:-\w+)*)\.zip")
MODULE = re.compile(r"aot/(\w+)/\1\.so")
DATE = (2020, 1, 1, 0, 0, 0)
"""Time of all files, so that the same modules make the same wheel."""
CAPABILITY = "9.0a"
"""The GPUs to compile for: H100 and H200."""
MODULES = ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float16", "float16")
"""Dtypes of queries, and of keys and values, of the tests and benchmarks that use FlashInfer. All have heads of 128."""


def compile_modules(folder: Path) -> Path:
    """Write a zip file of :data:`MODULES` for GPUs of :data:`CAPABILITY` and this CUDA; returns its path.

    Needs nvcc, which CUDA_HOME or PATH names, gcc and the packages of the extra ``gpu``, but no GPU and no driver.
    """
    with TemporaryDirectory() as build:
        # Linking names the driver's library, of which the modules use nothing.
        stub = ["gcc", "-shared", "-x", "c", "/dev/null", "-o", f"{build}/libcuda.so"]
        subprocess.run(stub, check=True)  # noqa: S603
        # FlashInfer reads these when it is imported, and looks for ninja in PATH.
        os.environ |= {"FLASHINFER_CUDA_ARCH_LIST": CAPABILITY, "FLASHINFER_WORKSPACE_BASE": build}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        os.environ |= {"FLASHINFER_EXTRA_LDFLAGS": f"-L{build}", "PATH": path}
        import torch

        from yardstick_llm.engine.runner.attention.flashinfer import VERSION, modules

        cuda = import_module("flashinfer.jit.cpp_ext").get_cuda_version()
        target = f"sm{CAPABILITY.replace('.', '')}-cu{cuda.major}{cuda.minor}"
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"flashinfer-{VERSION}-aot-{target}.zip"
        with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
            for dtype, kept in MODULES:
                for module in modules(128, getattr(torch, dtype), getattr(torch, kept)):
                    print(f"compiling {module.name}", file=sys.stderr, flush=True)
                    module.build(verbose=False)
                    packed.write(module.jit_library_path, f"aot/{module.name}/{module.name}.so")
    return written


def pack(source: Path, folder: Path) -> Path:
    """Write the wheel for the modules in the zip file ``source``; returns its path. Raises ValueError for another zip file."""
    found = FILE.fullmatch(source.name)
    if found is None:
        raise ValueError(f"{source.name}: the name must be like flashinfer-0.6.6-aot-sm90a-cu130.zip")
    version = f"{found['version']}+{found['target'].replace('-', '.').lower()}"
    info = f"{NAME}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{NAME}-{version}-{TAG}.whl"
    record = []
    with zipfile.ZipFile(source) as modules:
        names = sorted(entry.filename for entry in modules.infolist() if not entry.is_dir())
    for name in names:
        if not MODULE.fullmatch(name):
            raise ValueError(f"{source.name}: {name} is no module; expected aot/NAME/NAME.so")
    if not names:
        raise ValueError(f"{source.name}: there is no module in it")
    with zipfile.ZipFile(source) as modules, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:

        def write(name: str, content: bytes) -> None:
            packed.writestr(zipfile.ZipInfo(name, DATE), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")

        for name in names:
            write(f"flashinfer/data/{name}", modules.read(name))
        summary = "Compiled modules of FlashInfer, which are not compiled again where they are installed."
        requires = f"Requires-Dist: flashinfer-python=={found['version']}"
        write(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: {summary}\n{requires}\n".encode(),
        )
        write(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: flashinfer_wheel\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode())
        packed.writestr(zipfile.ZipInfo(f"{info}/RECORD", DATE), "\n".join([*record, f"{info}/RECORD,,", ""]))
    return wheel


if __name__ == "__main__":
    try:
        source, target = sys.argv[1], Path(sys.argv[2])
        print(compile_modules(target) if source == "--compile" else pack(Path(source), target))
    except (ValueError, OSError, zipfile.BadZipFile, IndexError, ImportError, subprocess.CalledProcessError) as error:
        sys.exit(f"flashinfer_wheel.py: {error}")
