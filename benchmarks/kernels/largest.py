"""Log-probabilities of drawn tokens and of the most probable ones, over a large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import Gpu, Row
from kernels.largest import token_logprobs, token_logprobs_reference

VOCAB = 151_936  # Qwen2.5 and Qwen3


def rows(gpu: Gpu) -> Iterator[Row]:
    """Yield rows without and with five alternatives, with PyTorch's operations (eager) as comparison."""
    for count in (1, 256):
        logits, chosen = torch.randn(count, VOCAB, device="cuda") * 3, torch.arange(count, device="cuda")
        for top_n in (0, 5):
            given = logits, chosen, top_n
            shape, read = f"[{count}, {VOCAB}], top {top_n}", 4.0 * logits.numel()
            yield gpu.moved("token_logprobs", shape, read, lambda given=given: token_logprobs(*given))  # type: ignore[misc]
            yield gpu.moved("token_logprobs, eager", shape, read, lambda given=given: token_logprobs_reference(*given))  # type: ignore[misc]
