"""Compiles the launched kernels for a Hopper GPU on a machine without one: the interpreter accepts more than the compiler.

It takes a process in which Triton and the kernels believe in a GPU, and a launch only compiles. :func:`compiled` asks it; the first
call starts it, because torch and Triton take seconds to import.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

SHARED_MEMORY = 232_448
"""Bytes that a program may have of a Hopper multiprocessor."""


def compiled(imports: str, *launches: str) -> list[list[dict[str, Any]]]:
    """For each of ``launches``, expressions over what ``imports`` imports and torch, the kernels that it launched, in order.

    Of each: name, warps, shared (bytes of shared memory), local (bytes of memory a thread for what its registers do not hold),
    ptx. Raises RuntimeError with the compiler's message where one does not compile.
    """
    return _compiler().ask(imports, launches)


@cache
def _compiler() -> Compiler:
    compiler = Compiler()
    atexit.register(compiler.close)
    return compiler


class Compiler:
    """A process that compiles."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._cache = tempfile.TemporaryDirectory()
        variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": self._cache.name, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.kernels.hopper import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **variables},
        )

    def ask(self, imports: str, launches: tuple[str, ...]) -> list[list[dict[str, Any]]]:
        """Run a program of :func:`compiled`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([imports, launches]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            _compiler.cache_clear()
            raise RuntimeError(f"The compiler has ended with status {self._process.wait()}. {self._messages()}")
        found = json.loads(answer)
        if isinstance(found, str):
            raise RuntimeError(found + self._messages())
        return found

    def _messages(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._said.close()
        self._cache.cleanup()


def serve() -> None:
    """Answer each program on standard input with its kernels, or with the text of its error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    believe()
    for line in sys.stdin:
        try:
            answer: Any = kernels_of(*json.loads(line))
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


def kernels_of(imports: str, launches: list[str]) -> list[list[dict[str, Any]]]:
    """The kernels that each of ``launches`` launches, as :func:`compiled` describes them."""
    names: dict[str, Any] = {}
    exec("import torch\n" + imports, names)
    found = []
    for launch in launches:
        _launched.clear()
        eval(launch, names)
        found.append([_described(kernel) for kernel in _launched])
    return found


def believe() -> None:
    """Make this process one with a GPU, before it imports a kernel."""
    import torch

    torch.cuda.is_available = lambda: True
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    import kernels.runtime

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    def launch(self: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **named: _launched.append(self.run(*arguments, grid=grid, warmup=True, **named))

    triton.runtime.driver.set_active(Driver())
    JITFunction.__getitem__ = launch
    kernels.runtime.INTERPRETED = True  # tensors of the CPU pass


_launched: list[Any] = []


def _described(kernel: Any) -> dict[str, Any]:
    metadata = kernel.metadata
    found = {"name": metadata.name, "warps": metadata.num_warps, "shared": metadata.shared, "ptx": kernel.asm["ptx"]}
    return found | {"local": _local_bytes(kernel.asm["cubin"])}


def _local_bytes(cubin: bytes) -> int:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":") for field in usage.split() if field.startswith(("STACK:", "LOCAL:")))
    return int(fields["STACK"]) + int(fields["LOCAL"])
