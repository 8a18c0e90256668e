"""Resources of the machine: device, number format, cores and CPU threads, and the slots and requests that fit its memory.

A container sets limits of cores and memory through cgroups, version 1 and 2 (docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1).
A limit that cannot be read does not exist.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.encoder import Model
from yardstick_llm.engine.models.encoder_config import EncoderConfig
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner.graphs import BUCKETS
from yardstick_llm.engine.settings import GPU_BATCHED_TOKENS, MAX_RUNNING_REQUESTS, RUNNING_REQUESTS, EngineSettings
from yardstick_llm.kernels.linear import BFLOAT16_INSTRUCTIONS, multiplies_bfloat16

logger = logging.getLogger(__name__)
T = TypeVar("T")


ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def cores(root: Path = ROOT, of_self: Path = SELF) -> float:
    """Cores' worth of time that this process may use; infinity without a limit."""
    unified = _folder(root, of_self, "")
    quota, _, period = _text(unified / "cpu.max").partition(" ")
    if not quota:
        single = _folder(root, of_self, "cpu")
        quota, period = _text(single / "cpu.cfs_quota_us"), _text(single / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def usable_cores() -> int:
    """Cores that threads of this process may run on at once, at least one."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(found, cores())))


def available_memory() -> float:
    """Bytes that this process may take without swapping, files that the kernel may drop included."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(MEMINFO), re.MULTILINE)
    machine = int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, free_memory())


def free_memory(root: Path = ROOT, of_self: Path = SELF) -> float:
    """Bytes up to this process's limit, files that the kernel may drop not counted as used; infinity without a limit."""
    folder = _folder(root, of_self, "")
    limit, used, idle = _text(folder / "memory.max"), _text(folder / "memory.current"), "inactive_file"
    if not limit:
        folder = _folder(root, of_self, "memory")
        limit, used = _text(folder / "memory.limit_in_bytes"), _text(folder / "memory.usage_in_bytes")
        idle = "total_inactive_file"
    if not (limit.isdigit() and used.isdigit()):
        return math.inf
    statistics = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    return max(0, int(limit) - int(used) + int(statistics.get(idle, 0)))


def _folder(root: Path, of_self: Path, controller: str) -> Path:
    """Folder of this process's group; in a container, whose group is mounted at the root, the root. controller: "" for the single
    hierarchy of version 2.
    """
    lines = [line.split(":", 2) for line in _text(of_self).splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    own = root / controller / paths.get(controller, "").lstrip("/")
    return own if own.is_dir() else root / controller


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def device_of(settings: EngineSettings, rank: int = 0) -> torch.device:
    """Device of process ``rank``; each process of a node has its own GPU.

    Raises :class:`ModelError` where the GPUs that are asked for cannot be used.
    """
    available = torch.cuda.device_count()
    kind = settings.device or ("cuda" if available else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank % settings.local_processes)
    if problem := _gpu_problem(device, available, settings.local_processes):
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
    processes = settings.local_processes * settings.machine_engines
    threads = settings.threads or max(1, math.ceil(min(torch.get_num_threads(), cores())) // processes)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


MOST_PRODUCTS = 64_000_000
"""Multiplications of a layer, or of the head, up to which one thread computes a step: 137 tokens of the demo model. One thread took
0.84 times as long as two with 127 of its tokens, and 0.59 times with 224. The margin is for cores that wake sooner."""
MOST_INT8_PRODUCTS = 512_000_000
"""Limit for a decoder in int8, whose products take a quarter of the time: 18 rows of SmolLM2-135M. On two cores of an AMD EPYC
(Zen 5), 16 rows took 0.77 times as long on one thread as on two."""
MOST_ENCODER_INT8_PRODUCTS = 440_000_000
"""Limit for an encoder in int8 whose layers are not computed in one call (:mod:`kernels.encoder_layers`): 62 tokens of layers of
size 768. Measured with all-MiniLM, 248 tokens of it, when it was computed layer by layer: one text of 64 tokens took 0.91 times
as long on one thread as on two, one of 128 tokens 1.20 times, and of 256 tokens 1.39 times."""


class StepThreads:
    """Computes small steps on the calling thread, and passes large ones to a thread that shares their operations with others.

    Each thread of a process has its own number of OpenMP threads, so none has to be changed for a step.

    OpenMP threads share every product and every larger operation of a step, and sleep until the next one
    (:mod:`engine.server.loop_client`). On two quiet cores of an Intel Xeon, waking a thread took 0.1 ms, more than it saves where
    operations are small: steps of the demo model with 1 to 32 rows took 0.56 to 0.65 times as long on one thread as on two
    (docs/benchmarks, "Fewer waits").
    """

    def __init__(self, most_tokens: int) -> None:
        """Leave the calling thread alone with its operations. ``most_tokens``: of a small step."""
        self._most_tokens = most_tokens
        self._large = ThreadPoolExecutor(1, "large-steps", torch.set_num_threads, (torch.get_num_threads(),))
        # Wait until it has set its number, because torch gives the last number that was set to threads that start later.
        self._large.submit(torch.get_num_threads).result()
        torch.set_num_threads(1)

    def run(self, tokens: int, compute: Callable[[], T]) -> T:
        """Return what ``compute``, which computes ``tokens`` tokens, returns."""
        return compute() if tokens <= self._most_tokens else self._large.submit(compute).result()


def step_threads(
    config: ModelConfig | EncoderConfig, device: torch.device, lenvm: ModelConfig | None = None, quantize: str | None = None
) -> StepThreads | None:
    """Return the threads for a model; None on a GPU, with one thread, and where even a step of one token is large.

    ``lenvm``: of the length model, which may be the larger one. A step's tokens count as if the larger one computed all. A token
    multiplies each weight of the largest layer or head once.
    """
    weights = max(_layer(config), config.hidden_size * config.vocab_size * config.lm_head, _layer(lenvm) if lenvm else 0)
    in_int8 = MOST_ENCODER_INT8_PRODUCTS if isinstance(config, EncoderConfig) else MOST_INT8_PRODUCTS
    most_tokens = (in_int8 if quantize == "int8" else MOST_PRODUCTS) // weights
    return None if device.type != "cpu" or torch.get_num_threads() == 1 or most_tokens == 0 else StepThreads(most_tokens)


def _layer(config: ModelConfig | EncoderConfig) -> int:
    heads = config.num_heads + config.num_kv_heads
    gated = not isinstance(config, EncoderConfig) or config.family.gated
    return config.hidden_size * (2 * heads * config.head_dim + (2 + gated) * config.intermediate_size)


MAX_SLOTS = 131_072
"""Most slots on a CPU."""
MEMORY_SHARE, GPU_MEMORY_SHARE = 0.25, 0.8
GPU_FIXED_BYTES = 1 << 30
"""Workspaces of attention and products, loaded kernels, and logits of 256 rows."""
SLOTS_A_REQUEST = 1024
"""Tokens of a request, prompt and output, where the default number of running requests fills the slots."""
LOGIT_COPIES = 4
"""Float32 tensors as large as the logits, while a step draws."""


def default_slots(
    decoders: Sequence[Decoder], kept: Sequence[torch.dtype], processes: int, tokens: int = GPU_BATCHED_TOKENS
) -> int:
    """Return the number of slots for which a share of the free memory suffices. A slot has keys and values in all ``decoders``,
    those of each in its dtype of ``kept``. On a CPU all ``processes``, those of other engines here included, share one memory;
    on GPUs each has its own.

    On a GPU that a model nearly fills, the share is less, so that steps of ``tokens`` have what they need.
    """
    weight = decoders[0].embed.weight
    size = sum(map(slot_bytes, decoders, kept))
    if weight.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(weight.device)
        needed = GPU_FIXED_BYTES + max(step_bytes(decoder, tokens + BUCKETS[-1]) for decoder in decoders)
        return max(1024, int(min(free * GPU_MEMORY_SHARE, free - needed)) // size)
    return max(1024, min(MAX_SLOTS, int(available_memory() * MEMORY_SHARE) // (processes * size)))


def default_running_requests(decoders: Sequence[Decoder], slots: int, tokens: int) -> int:
    """Return the number of requests to compute at once: on a GPU as many as fill the slots and leave memory for their logits, when
    the slots of ``decoders[0]`` are allocated and those of a length model are not."""
    weight, config = decoders[0].embed.weight, decoders[0].config
    if weight.device.type != "cuda":
        return RUNNING_REQUESTS
    free, _ = torch.cuda.mem_get_info(weight.device)
    others = sum(slots * slot_bytes(decoder, decoder.embed.weight.dtype) for decoder in decoders[1:])
    spare = free - others - GPU_FIXED_BYTES - max(step_bytes(decoder, tokens + BUCKETS[-1]) for decoder in decoders)
    more = max(0, spare) // (LOGIT_COPIES * torch.float32.itemsize * config.vocab_size)
    return max(RUNNING_REQUESTS, min(MAX_RUNNING_REQUESTS, slots // SLOTS_A_REQUEST, RUNNING_REQUESTS + more))


def slot_bytes(decoder: Decoder, kept: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in this process."""
    config = decoder.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kept.itemsize


def step_bytes(decoder: Model, tokens: int) -> int:
    """Return the bytes of a step's tensors where most of them are alive: in attention or behind the gate of a layer's feed-forward
    part. The memory of CUDA graphs is apart and has those of their largest step."""
    config = decoder.config
    attention = (3 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # projected heads, queries, output
    inner = 3 * config.intermediate_size  # gate and up, and their product
    if config.experts is not None:
        # As much for each chosen expert, or their outputs, in the model's dtype and twice in float32.
        inner = max(inner, config.experts.chosen * max(3 * config.experts.size, 5 * config.hidden_size))
    return tokens * (4 * config.hidden_size + max(attention, inner)) * decoder.embed.weight.dtype.itemsize
