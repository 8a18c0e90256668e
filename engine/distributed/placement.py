"""Device, dtype and CPU threads of one process of the model."""

from __future__ import annotations

import math

import torch

from engine.device import cgroup
from engine.models.errors import ModelError
from engine.settings import EngineSettings


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


def set_threads(settings: EngineSettings) -> None:
    """Set the CPU threads of this process. More threads than the container may use of the cores only delay each other."""
    threads = settings.threads or max(1, math.ceil(min(torch.get_num_threads(), cgroup.cores())) // settings.tensor_parallel)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
