"""What an engine pod is told at its start; parsed once, frozen. "auto" values are None here and resolved in `engine.build`."""

from __future__ import annotations

import msgspec

DTYPES = ("float32", "bfloat16", "float16")


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine. Lengths and sizes are in tokens."""

    model: str
    """A model directory, or a hub id such as ``Qwen/Qwen3-0.6B``."""
    name: str
    """What clients call the model."""
    dtype: str = "float32"
    """One of :data:`DTYPES`."""
    max_tokens_in_cache: int | None = None
    """Slots: tokens whose keys and values are kept at once. None: as many as a quarter of the free memory holds, up to 131,072."""
    token_budget: int = 2048
    """Tokens computed in one step."""
    max_running: int = 256
    """Requests worked on at once."""
    max_waiting: int = 4096
    """Requests queued before new ones are refused."""
    overlap: bool = False
    """Settle a step while the next one is computed. It pays where a device computes beside the processor."""
    threads: int | None = None
    """CPU threads of the model's arithmetic, in each process. None: one a core, divided among the processes."""
    tensor_parallel: int = 1
    """Processes that share the model, each with a part of every layer and of the keys and values."""
