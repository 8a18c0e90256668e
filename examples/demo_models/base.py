"""Trains the base model: next-token prediction on the predictable parts of documents."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.demo_models.batches import Batch, training_batches
from examples.demo_models.forward import causal_hidden
from examples.demo_models.shapes import initialise
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder

LEARNING_RATE, WARM_UP = 2e-3, 100

Progress = Callable[[int, int, float], None]
"""(finished steps, total steps, loss)"""


def train_base(config: ModelConfig, tokenizer: Tokenizer, *, steps: int, seed: int, progress: Progress) -> Decoder:
    """Train a base model from random weights."""
    decoder = Decoder(config)
    initialise(decoder, config.num_layers, seed)
    optimizer = make_optimizer(decoder, LEARNING_RATE)
    for step, batches in enumerate(training_batches(tokenizer, seed, steps)):
        set_learning_rate(optimizer, LEARNING_RATE, step, steps)
        loss = torch.stack([weighted_loss(decoder, batch) for batch in batches]).sum()
        descend(optimizer, decoder, loss)
        progress(step + 1, steps, loss.item())
    return decoder.eval()


def weighted_loss(decoder: Decoder, batch: Batch) -> Tensor:
    """Return the summed, weighted cross entropy; only rows with a weight go through the head."""
    learned = batch.weights > 0
    logits = decoder.logits(causal_hidden(decoder, batch.tokens)[learned])
    losses = nn.functional.cross_entropy(logits, batch.targets[learned], reduction="none")
    return (losses * batch.weights[learned]).sum()


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Return a linear warm-up, then half a cosine down to 2 % of the peak."""
    warm_up = min(WARM_UP, steps // 10 + 1)
    done = max(0.0, (step - warm_up) / max(1, steps - warm_up))
    rate = peak * min((step + 1) / warm_up, 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = rate


def descend(optimizer: torch.optim.Optimizer, model: nn.Module, loss: Tensor) -> None:
    """Take one optimiser step; the norm of the gradient is clipped to 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
