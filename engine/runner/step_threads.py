"""Computes small steps on one thread of a CPU.

OpenMP threads share every product and every larger operation of a step, and sleep until the next one
(:mod:`engine.serving.environment`). On two quiet cores of an Intel Xeon, waking a thread took 0.1 ms, more than it saves where
operations are small: steps of the demo model with 1 to 32 rows took 0.56 to 0.65 times as long on one thread as on two
(docs/benchmarks, "Fewer waits").
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from engine.models.config import ModelConfig

T = TypeVar("T")

MOST_PRODUCTS = 64_000_000
"""Multiplications of a layer, or of the head, up to which one thread computes a step: 137 tokens of the demo model. One thread took
0.84 times as long as two with 127 of its tokens, and 0.59 times with 224. The margin is for cores that wake sooner."""


class StepThreads:
    """Computes small steps on the calling thread, and passes large ones to a thread that shares their operations with others.

    Each thread of a process has its own number of OpenMP threads, so none has to be changed for a step.
    """

    def __init__(self, weights: int) -> None:
        """Leave the calling thread alone with its operations. ``weights``: elements of the largest layer or head; each is
        multiplied once for a token."""
        self._most_tokens = MOST_PRODUCTS // weights
        self._large = ThreadPoolExecutor(1, "large-steps", torch.set_num_threads, (torch.get_num_threads(),))
        # Wait until it has set its number, because torch gives the last number that was set to threads that start later.
        self._large.submit(torch.get_num_threads).result()
        torch.set_num_threads(1)

    def run(self, tokens: int, compute: Callable[[], T]) -> T:
        """Return what ``compute``, which computes ``tokens`` tokens, returns."""
        return compute() if tokens <= self._most_tokens else self._large.submit(compute).result()


def step_threads(config: ModelConfig, device: torch.device, lenvm: ModelConfig | None = None) -> StepThreads | None:
    """Return the threads for a model; None on a GPU, with one thread, and where even a step of one token is large.

    ``lenvm``: of the length model, which may be the larger one. A step's tokens count as if the larger one computed all.
    """
    weights = max(_layer(config), config.hidden_size * config.vocab_size * config.lm_head, _layer(lenvm) if lenvm else 0)
    if device.type != "cpu" or torch.get_num_threads() == 1 or weights > MOST_PRODUCTS:
        return None
    return StepThreads(weights)


def _layer(config: ModelConfig) -> int:
    heads = config.num_heads + config.num_kv_heads
    return config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)
