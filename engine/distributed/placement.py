"""Device, dtype and CPU threads of one process of the model."""

from __future__ import annotations

import logging
import math

import torch

from engine.device import cgroup
from engine.models.errors import ModelError
from engine.settings import EngineSettings
from kernels.linear import BFLOAT16_INSTRUCTIONS, multiplies_bfloat16

logger = logging.getLogger(__name__)


def device_of(settings: EngineSettings, rank: int = 0) -> torch.device:
    """Device of process ``rank``. Raises :class:`ModelError` where the GPUs that are asked for cannot be used."""
    available = torch.cuda.device_count()
    kind = settings.device or ("cuda" if available else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank)
    if problem := _gpu_problem(device, available, settings.tensor_parallel):
        raise ModelError(f"The engine cannot compute on the GPU: {problem}.")
    return device


def _gpu_problem(device: torch.device, available: int, needed: int) -> str | None:
    """Why the GPUs cannot be used, and what to do about it; None where they can."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is built without CUDA; install a build with CUDA, or take --device cpu"
    if not available:
        return (
            "torch finds no GPU; check that nvidia-smi lists one here, and that a container or pod is given one "
            '(docker run --gpus, limits."nvidia.com/gpu"), or take --device cpu'
        )
    if available < needed:
        return f"{needed} are needed and {available} found; lower --tensor-parallel, or take --device cpu"
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:  # such as a driver that is too old for this build, or a GPU that another process owns
        first = str(error).partition("\n")[0].rstrip(".")
        return f"{device} does not work: {first}; check the driver with nvidia-smi, or take --device cpu"
    return None


def dtype_of(settings: EngineSettings, device: torch.device) -> torch.dtype:
    """Dtype of weights, keys and values."""
    dtype: torch.dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    return dtype


def warn_of_slow_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Log a warning where the processor emulates bfloat16."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return
    if torch.cpu.get_capabilities().get("architecture") == "x86_64" and not multiplies_bfloat16():
        logger.warning(
            "--dtype bfloat16 is several times slower than float32 on this processor, which lacks %s; use --dtype float32",
            " and ".join(BFLOAT16_INSTRUCTIONS),
        )


def set_threads(settings: EngineSettings) -> None:
    """Set the CPU threads of this process. More threads than the container may use of the cores only delay each other."""
    processes = settings.tensor_parallel * settings.machine_engines
    threads = settings.threads or max(1, math.ceil(min(torch.get_num_threads(), cgroup.cores())) // processes)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
