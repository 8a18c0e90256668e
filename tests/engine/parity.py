"""Rows of every readout of the main model as Hugging Face transformers computes them, one prompt at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from tests.checkpoints import CLASSIFIERS, FAMILIES, HEADLESS, make_checkpoint, write_pooling
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings

MODELS = ("causal last", "causal mean", "headless last", "headless mean", "classes")
"""Head and pooling."""
CLASSES = 5


def make_model(directory: Path, family: str, kind: str) -> Path:
    """Write a model of one of :data:`MODELS`."""
    head, _, pooling = kind.partition(" ")
    if head == "classes":
        return make_checkpoint(directory, family, model_class=CLASSIFIERS[family], num_labels=CLASSES)
    make_checkpoint(directory, family, model_class=HEADLESS[family] if head == "headless" else None)
    return write_pooling(directory, {"last": "lasttoken", "mean": "mean_tokens"}[pooling])


def make_loop(model: Path, **settings: Any) -> Loop:
    """The loop of a model, with 4,096 slots unless ``settings`` say otherwise."""
    return build_loop(EngineSettings(model=str(model), name="test", **({"max_total_tokens": 4096} | settings)))


def readouts_of(kind: str) -> list[wire.ScoreReadout]:
    """Readouts that a model of one of :data:`MODELS` has."""
    if kind == "classes":
        return [wire.Classes()]
    embeddings = [wire.Embedding(), wire.Embedding(dimensions=24), wire.Embedding(dimensions=8, normalize=False)]
    if kind.startswith("headless"):
        return [*embeddings, wire.Embedding(normalize=False)]
    labels = [5, 17, 300]
    return [*embeddings, wire.Labels(labels), wire.Labels([*labels, 9], raw=True), wire.Labels([17], raw=True), wire.Likelihood()]


class Reference:
    """A model that transformers has loaded in float32."""

    def __init__(self, directory: Path, family: str, kind: str) -> None:
        self.mean = kind.endswith("mean")
        classes = {"classes": CLASSIFIERS.get(family), "headless": HEADLESS[family]}
        model_class = classes.get(kind.partition(" ")[0]) or FAMILIES[family][1]
        self.model: PreTrainedModel = model_class.from_pretrained(directory, dtype=torch.float32).eval()

    def hidden(self, tokens: list[int]) -> Tensor:
        """[tokens, hidden] after the final norm"""
        return self.model.base_model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.inference_mode()
    def rows(self, message: wire.Score) -> list[list[float]]:
        return [self.row(message.prefix, branch, message.readout) for branch in message.branches]

    def row(self, prefix: list[int], branch: list[int], readout: wire.ScoreReadout) -> list[float]:
        tokens = prefix + branch
        if isinstance(readout, wire.Classes):
            return self.model(torch.tensor([tokens])).logits[0].tolist()
        if isinstance(readout, wire.Embedding):
            hidden = self.hidden(tokens)
            vector = (hidden.mean(0) if self.mean else hidden[-1])[: readout.dimensions]
            return (normalize(vector, dim=0) if readout.normalize else vector).tolist()
        logits = self.model(torch.tensor([tokens])).logits[0]
        if isinstance(readout, wire.Labels):
            return (logits[-1] if readout.raw else logits[-1].log_softmax(-1))[readout.tokens].tolist()
        predicting = logits[len(prefix) - 1 : -1]
        targets = torch.tensor(branch)
        greedy = bool((predicting.argmax(-1) == targets).all())
        return [*predicting.log_softmax(-1)[torch.arange(len(branch)), targets].tolist(), float(greedy)]

    @torch.inference_mode()
    def greedy(self, prefix: list[int], count: int) -> list[int]:
        """The most probable continuation."""
        tokens = list(prefix)
        for _ in range(count):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prefix) :]


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], output: list[int], count: int) -> None:
    """``output`` has ``count`` tokens, each the most probable one after the tokens before it. ``model`` computes all at once."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]  # [count, vocab]
    assert len(output) == count
    assert output == logits.argmax(-1).tolist()


def some_tokens(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, 320) for _ in range(rng.randint(low, high))]


def assert_equal_rows(actual: list[list[float]], expected: list[list[float]], tolerance: float = 1e-5) -> None:
    assert list(map(len, actual)) == list(map(len, expected))
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=tolerance, rtol=1e-5)
