"""Device, dtype and CPU threads of one process of the model."""

from __future__ import annotations

import logging
import math

import torch

from engine.device import cgroup
from engine.models.errors import ModelError
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Any of these multiplies bfloat16."""


def device_of(settings: EngineSettings, rank: int = 0) -> torch.device:
    """Device of process ``rank``. Raises :class:`ModelError` where there are too few GPUs."""
    available = torch.cuda.device_count()
    kind = settings.device or ("cuda" if available else "cpu")
    if kind == "cuda" and available < settings.tensor_parallel:
        raise ModelError(
            f"GPUs needed: {settings.tensor_parallel}, found: {available}; lower --tensor-parallel, or take --device cpu."
        )
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def dtype_of(settings: EngineSettings, device: torch.device) -> torch.dtype:
    """Dtype of weights, keys and values."""
    dtype: torch.dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    return dtype


def warn_of_slow_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Log a warning where the processor emulates bfloat16."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return
    found = torch.cpu.get_capabilities()
    if found.get("architecture") == "x86_64" and not any(found.get(name) for name in BFLOAT16_INSTRUCTIONS):
        logger.warning(
            "--dtype bfloat16 is several times slower than float32 on this processor, which lacks %s; use --dtype float32",
            " and ".join(BFLOAT16_INSTRUCTIONS),
        )


def set_threads(settings: EngineSettings) -> None:
    """Set the CPU threads of this process. More threads than the container may use of the cores only delay each other."""
    threads = settings.threads or max(1, math.ceil(min(torch.get_num_threads(), cgroup.cores())) // settings.tensor_parallel)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
