"""A preset fitted to a model's tokeniser: its labels as token ids, and the scores that follow from the numbers of an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from engine import wire
from gateway.presets.preset import Preset, Task


class Fitted(msgspec.Struct, frozen=True):
    """The preset of a served model."""

    preset: Preset
    labels: list[list[int]] = []
    """Token ids of each label."""
    categories: list[int] = []
    """Token id of each category."""
    categories_prefix: list[int] = []
    """Tokens between a prompt and the token of a category."""

    @property
    def readout(self) -> wire.ScoreReadout:
        """The output that engines compute after each prompt."""
        if self.preset.task == "embed":
            return wire.Embedding()
        if not self.labels:
            return wire.Classes()
        tokens = [id for label in self.labels for id in label] + self.categories
        return wire.Labels(tokens, raw=self.preset.raw or self._relative)

    def serves(self, task: Task) -> bool:
        """Whether prompts for ``task`` can be built and read. A reranker with a head classifies texts, too, which are documents
        without a query."""
        if self.preset.task == task:
            return True
        return task == "classify" and self.preset.task == "rerank" and not self.labels and bool(self.preset.template)

    @property
    def _relative(self) -> bool:
        """Whether labels are compared with each other only, so that the sum over the vocabulary cancels."""
        return len(self.labels) > 1 and not self.categories

    @property
    def names(self) -> list[str]:
        """Name of each label: its first spelling."""
        return [(label if isinstance(label, str) else label[0]).strip() for label in self.preset.labels]

    def score(self, row: Sequence[float], *, raw: bool = False) -> float:
        """Return the score of one prompt, or with ``raw`` the number before the activation, from a row of :attr:`readout`."""
        logit = self._logit(row)
        if raw or self.preset.activation in ("none", "difference"):
            return logit
        return sigmoid(logit * self.preset.scale if self.preset.activation == "sigmoid" else logit)

    def _logit(self, row: Sequence[float]) -> float:
        """The logit of the first label; against all others where the activation compares them."""
        if not self.labels:
            return row[0]
        logits = self.label_logits(row)
        if self.preset.activation in ("none", "sigmoid"):
            return logits[0]
        others = log_sum(logits[1:]) if len(logits) > 1 else math.log1p(-min(math.exp(logits[0]), 1 - 1e-16))
        if others == -math.inf:
            return 0.0 if logits[0] == -math.inf else MOST_LOGIT
        return max(logits[0] - others, -MOST_LOGIT)

    def label_logits(self, row: Sequence[float]) -> list[float]:
        """Return the logit or log-probability of each label from the row of its tokens."""
        logits, start = [], 0
        for label in self.labels:
            logits.append(log_sum(row[start : start + len(label)]))
            start += len(label)
        return logits

    def category_logprobs(self, row: Sequence[float]) -> list[float]:
        """Return the log-probability of each category from the row of the prompt that ends with the categories' prefix."""
        return list(row[len(row) - len(self.categories) :])


MOST_LOGIT = 1e3
"""Stands for an infinite difference of logits, which JSON cannot express."""


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(−logit)) without overflow."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def softmax(logits: Sequence[float]) -> list[float]:
    """Return the probabilities. If every logit is minus infinity, they are equal."""
    total = log_sum(logits)
    if total == -math.inf:
        return [1 / len(logits)] * len(logits)
    return [math.exp(logit - total) for logit in logits]


def log_sum(logits: Sequence[float]) -> float:
    """Return the logarithm of the sum of the exponentials."""
    highest = max(logits)
    if highest == -math.inf or len(logits) == 1:
        return highest
    return highest + math.log(sum(math.exp(logit - highest) for logit in logits))
