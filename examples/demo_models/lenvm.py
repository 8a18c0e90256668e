"""Trains the length-value model, which estimates the remaining length of a text, on texts of the base model.

Definition of the value: "Length Value Model", arXiv 2604.27039, with the sign of its public code: v = 1 − γ^remaining. The
remaining tokens include the end token, so v is 1 − γ just before the end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.demo_models.base import Progress, descend, make_optimizer, set_learning_rate
from examples.demo_models.corpus.documents import draw_request
from examples.demo_models.forward import causal_hidden
from examples.demo_models.generate import generate
from examples.demo_models.shapes import initialise
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.lenvm import LenVM

GAMMA = 0.985
"""1 − γ^L is 0.89 for the longest usual texts (150 tokens) and 0.17 for the shortest (12)."""

LEARNING_RATE = 2e-3
ROWS = 64
LIMIT = 320
"""Tokens at which a generation is abandoned; few reach it."""

HELD_BACK = 0.06
"""Share of the texts that serves only to select the best state."""
CHECK_EVERY = 50


@dataclass(frozen=True)
class Text:
    """A prompt and the base model's continuation, which ends with the end token."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Batch:
    """Texts, and the value of each of their states."""

    tokens: Tensor
    """[rows, time]"""
    values: Tensor
    """[rows, time]: value of the state that ends with this token"""
    counted: Tensor
    """[rows, time] bool: True from the prompt's last token to the last token before the end token"""


def write_texts(
    base: Decoder, tokenizer: Tokenizer, *, count: int, seed: int, stray: float = 0.0, held_out: bool = False
) -> list[Text]:
    """Generate ``count`` texts at temperature 1, without those that did not end; ``stray``: see :func:`generate`."""
    rng = Random(seed)
    requests = [draw_request(rng, held_out=held_out)[0] for _ in range(count)]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch_fast(requests)]
    outputs = generate(base, prompts, seed=seed, limit=LIMIT, stray=stray)
    pairs = zip(prompts, outputs, strict=True)
    return [Text(prompt, output) for prompt, output in pairs if output[-1] in base.config.eos_token_ids]


def collate(texts: list[Text]) -> Batch:
    """Pad texts to the length of the longest."""
    time = max(len(text.prompt) + len(text.output) - 1 for text in texts)
    tokens = torch.zeros(len(texts), time, dtype=torch.int64)
    remaining = torch.zeros(len(texts), time)
    for row, text in enumerate(texts):
        end = len(text.prompt) + len(text.output) - 1
        tokens[row, :end] = torch.tensor(text.prompt + text.output[:-1])
        remaining[row, len(text.prompt) - 1 : end] = torch.arange(len(text.output), 0, -1)
    return Batch(tokens, 1 - GAMMA**remaining, remaining > 0)


def train_lenvm(config: ModelConfig, texts: list[Text], *, steps: int, seed: int, progress: Progress) -> LenVM:
    """Train a value model from random weights; return its best state on the first texts, which are held back."""
    model = LenVM(config)
    initialise(model, config.num_layers, seed)
    optimizer = make_optimizer(model, LEARNING_RATE)
    held_back = max(1, round(len(texts) * HELD_BACK))
    checks = [collate(texts[start : min(start + ROWS, held_back)]) for start in range(0, held_back, ROWS)]
    best, best_state = float("inf"), copy.deepcopy(model.state_dict())
    for step, batch in enumerate(_batches(texts[held_back:], seed, steps)):
        set_learning_rate(optimizer, LEARNING_RATE, step, steps)
        descend(optimizer, model, _loss(model, batch).sum() / (ROWS * 50))
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            loss = _mean_loss(model, checks)
            progress(step + 1, steps, loss)
            if loss < best:
                best, best_state = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return model.eval()


def _batches(texts: list[Text], seed: int, steps: int) -> Iterator[Batch]:
    """Yield batches of texts of similar length, in random order, for ``steps`` steps."""
    rng = Random(seed)
    ordered = sorted(texts, key=lambda text: len(text.prompt) + len(text.output))
    groups: list[list[Text]] = []
    for _ in range(steps):
        if not groups:
            shift = rng.randrange(ROWS)
            groups = [ordered[max(0, start) : start + ROWS] for start in range(-shift, len(ordered), ROWS)]
            groups = [group for group in groups if group]
            rng.shuffle(groups)
        yield collate(groups.pop())


def _loss(model: LenVM, batch: Batch) -> Tensor:
    """Return the cross entropy between value and estimate in each counted state. Its minimum is the mean value."""
    z, _ = model.value(causal_hidden(model, batch.tokens)[batch.counted])
    return nn.functional.binary_cross_entropy_with_logits(z, batch.values[batch.counted], reduction="none")


@torch.no_grad()
def _mean_loss(model: LenVM, batches: list[Batch]) -> float:
    return torch.cat([_loss(model, batch) for batch in batches]).mean().item()
