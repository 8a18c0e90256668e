"""What an engine pod is told at its start; parsed once, frozen. None leaves the choice to :mod:`engine.build`."""

from __future__ import annotations

from typing import Literal

import msgspec

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
QUANTIZE = ("fp8",)
ATTENTION = ("auto", "reference", "triton", "flashinfer")
CUDA_GRAPHS = ("auto", "on", "off")


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine. Lengths and sizes are in tokens."""

    model: str
    """A model directory, or a hub id such as ``Qwen/Qwen3-0.6B``."""
    name: str
    """What clients call the model."""
    length_model: str | None = None
    """Of a length-value model for guided generations: a directory, or a hub id. Its vocabulary is the model's."""
    length_gamma: float | None = None
    """The length model's gamma, in (0, 1). None: what ``length_value.json`` beside its weights says, or else 0.997."""
    device: str | None = None
    """One of :data:`DEVICES`. None: a GPU where there is one."""
    dtype: str | None = None
    """One of :data:`DTYPES`. None: bfloat16 on a GPU, float32 on a CPU."""
    quantize: Literal["fp8"] | None = None
    """What the layers' matrix products compute in: 8-bit weights and activations, with a scale a row. None: ``dtype``."""
    attention: str = "auto"
    """One of :data:`ATTENTION`."""
    cuda_graphs: str = "auto"
    """One of :data:`CUDA_GRAPHS`: whether small steps, and the length model's small passes over candidates, are captured at
    the start and replayed. auto: where they can be."""
    max_total_tokens: int | None = None
    """Slots: tokens whose keys and values are kept at once, by each model. None: as many as a quarter of the free memory holds, up
    to 131,072; on a GPU as many as four fifths of its free memory hold."""
    max_batched_tokens: int | None = None
    """Tokens computed in one step; a quarter of it while several tenants share the engine, which keeps the step short that a new
    request waits for. None: 2,048 on a CPU, 8,192 on a GPU."""
    max_running_requests: int = 256
    """Requests worked on at once."""
    max_waiting: int = 4096
    """Requests queued before new ones are refused, or displace those of the tenant with most in the queue."""
    max_wait_seconds: float = 30.0
    """Longest time that a request of a tenant would probably be queued for; where it is longer, new ones are refused."""
    stall_seconds: float = 120.0
    """Longest time that a step may take, before the engine is not ready. It holds for a loop that computes: one that stands still
    is noticed after two seconds. A first step of 2,048 tokens through 7 billion float32 parameters takes about as long on four
    cores; afterwards four times the longest step is allowed in any case."""
    overlap: bool | None = None
    """Settle a step while the next one is computed. None: on a GPU, which computes beside the processor."""
    threads: int | None = None
    """CPU threads of the model's arithmetic, in each process. None: one a core that the container may use, divided among the
    processes."""
    tensor_parallel: int = 1
    """Processes that share the model, each with a part of every layer and of the keys and values."""
