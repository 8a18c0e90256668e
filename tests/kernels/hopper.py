"""Compiles the launched kernels for a Hopper GPU on a machine without one: the interpreter accepts more than the compiler.

It takes a process in which Triton and the kernels believe in a GPU, and a launch only compiles: :func:`compiled` runs one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

SHARED_MEMORY = 232_448
"""Bytes that a program may have of a Hopper multiprocessor."""


def compiled(imports: str, *launches: str) -> list[list[dict[str, Any]]]:
    """For each of ``launches``, expressions over what ``imports`` imports and torch, the kernels that it launched, in order.

    Of each: name, warps, shared (bytes of shared memory), local (bytes of memory a thread for what its registers do not hold),
    ptx. Raises RuntimeError with the compiler's message where one does not compile.
    """
    program = "\n".join(
        ["from tests.kernels.hopper import believe, report", "believe()", imports, "import torch"]
        + [f"report(lambda: {launch})" for launch in launches]
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    if ran.returncode != 0:
        raise RuntimeError(ran.stdout + ran.stderr)
    return [json.loads(line) for line in ran.stdout.splitlines()]


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


def report(launch: Callable[[], object]) -> None:
    """Print what ``launch`` launched as a line of JSON."""
    _launched.clear()
    launch()
    print(json.dumps([_described(kernel) for kernel in _launched]))


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
