"""Which GPUs each of several engines on this machine uses."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from gateway.commands.errors import CommandError, WrongUsage

VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_SECONDS = 120.0


def gpus_of_engines(engines: int, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str | None]:
    """Return :data:`VISIBLE` for each engine; None where an engine may see all GPUs, because it is alone or computes on a CPU.

    ``arguments``: options of the engines. Raises :class:`WrongUsage` if there are too few GPUs, and :class:`CommandError` if they
    cannot be counted.
    """
    device, processes = _placement(arguments)
    found = [] if engines == 1 or device == "cpu" else _found(environment)
    if not found:  # where `--device cuda` was given, the engine explains what is missing
        return [None] * engines
    needed = engines * processes
    if len(found) < needed:
        each = f" of {processes} GPUs each (--tensor-parallel)" if processes > 1 else ""
        remedy = "lower --engines, or add --device cpu"
        raise WrongUsage(f"--engines {engines}{each} needs {needed} GPUs, and torch finds {len(found)}; {remedy}")
    return [",".join(found[engine * processes : (engine + 1) * processes]) for engine in range(engines)]


def _placement(arguments: Sequence[str]) -> tuple[str | None, int]:
    """Return device and processes of each engine. A wrong value is left to the engine, which refuses it."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--device")
    parser.add_argument("--tensor-parallel", default="1")
    try:
        known, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return None, 1
    return known.device, int(known.tensor_parallel) if known.tensor_parallel.isdecimal() else 1


def _found(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that torch finds, as :data:`VISIBLE` names them. A process of its own asks, because importing torch takes
    seconds and hundreds of megabytes; builds without CUDA find none. Raises :class:`CommandError`."""
    if version("torch").endswith("+cpu"):
        return []
    command = [sys.executable, "-c", _COUNT]
    try:
        asked = subprocess.run(  # noqa: S603 - our own program
            command, env=environment, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"torch did not count the GPUs in {_COUNT_SECONDS:g} s; check the driver, or add --device cpu") from None
    count = int(asked.stdout) if asked.stdout.strip().isdecimal() else 0
    listed = environment.get(VISIBLE)
    names = [str(number) for number in range(count)] if listed is None else [name.strip() for name in listed.split(",")]
    return names[:count]
