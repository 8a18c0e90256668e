"""Divides the prompts of a message into other prefixes and branches, for readouts that need this."""

from __future__ import annotations

from typing import NamedTuple

from engine import wire
from engine.ints import Ints, ints


class PromptParts(NamedTuple):
    """A score's prompts as the engine computes them."""

    prefix: list[int]
    branches: list[list[int]]
    targets: list[Ints]
    """[branch] for likelihoods: row i of a branch predicts target i. Empty for other readouts."""


def prompt_parts_of(message: wire.Score, *, mean_pooling: bool) -> PromptParts:
    """Return the parts of a message's prompts. ``mean_pooling``: whether an embedding is the mean over the whole prompt.

    For likelihoods, each branch starts with the last token of the message's prefix, whose row predicts the first target. It lacks
    the last token of the message's branch, whose row predicts no target. For means over the prompt, each branch has the whole
    prompt, because the prefix cache keeps no hidden states.
    """
    prefix, branches = message.prefix, message.branches
    if isinstance(message.readout, wire.Likelihood):
        computed = [[prefix[-1], *tokens[:-1]] for tokens in branches]
        return PromptParts(prefix[:-1], computed, [ints(tokens) for tokens in branches])
    if isinstance(message.readout, wire.Embedding) and mean_pooling and prefix:
        return PromptParts([], [prefix + tokens for tokens in branches], [])
    return PromptParts(prefix, branches, [])
