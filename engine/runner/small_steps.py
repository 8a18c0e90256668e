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


class SmallSteps:
    """A thread whose operations use no other one."""

    def __init__(self, weights: int) -> None:
        """``weights``: elements of the largest layer or head; each is multiplied once for a token."""
        self._most_tokens = MOST_PRODUCTS // weights
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "small-steps", torch.set_num_threads, (1,))
        self._thread.submit(torch.get_num_threads).result()  # it has started
        torch.set_num_threads(threads)  # torch sets the calling thread, and those that start later

    def run(self, tokens: int, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns. It computes ``tokens`` tokens, and runs in the calling thread if they are many."""
        return self._thread.submit(compute).result() if tokens <= self._most_tokens else compute()


def small_steps(config: ModelConfig, device: torch.device) -> SmallSteps | None:
    """Return the thread for a model; None where all of its steps are better computed as they are."""
    heads = config.num_heads + config.num_kv_heads
    layer = config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)
    weights = max(layer, config.hidden_size * config.vocab_size * config.lm_head)
    if device.type != "cpu" or torch.get_num_threads() == 1 or weights > MOST_PRODUCTS:
        return None
    return SmallSteps(weights)
