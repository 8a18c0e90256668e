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


def prompt_parts_of(message: wire.Score, *, mean_pooling: bool, pad: int | None = None) -> PromptParts:
    """Return the parts of a message's prompts. ``mean_pooling``: whether an embedding is the mean over the whole prompt. ``pad``:
    token that a classification head leaves out at the end.

    For likelihoods, each branch starts with the last token of the message's prefix, whose row predicts the first target. It lacks
    the last token of the message's branch, whose row predicts no target. For means over the prompt, each branch has the whole
    prompt, because the prefix cache keeps no hidden states; and so do branches of a head if one of them is padding alone.
    """
    prefix, branches = message.prefix, message.branches
    if isinstance(message.readout, wire.Likelihood):
        computed = [[prefix[-1], *tokens[:-1]] for tokens in branches]
        return PromptParts(prefix[:-1], computed, [ints(tokens) for tokens in branches])
    if isinstance(message.readout, wire.Embedding) and mean_pooling and prefix:
        return PromptParts([], [prefix + tokens for tokens in branches], [])
    if isinstance(message.readout, wire.Classes) and pad is not None and any(tokens[-1] == pad for tokens in branches):
        unpadded = [without_padding(tokens, pad) for tokens in branches]
        if all(unpadded):
            return PromptParts(prefix, unpadded, [])
        return PromptParts([], [without_padding(prefix + tokens, pad) or (prefix + tokens)[:1] for tokens in branches], [])
    return PromptParts(prefix, branches, [])


def without_padding(tokens: list[int], pad: int) -> list[int]:
    """Return ``tokens`` up to the last one that is not ``pad``."""
    end = len(tokens)
    while end and tokens[end - 1] == pad:
        end -= 1
    return tokens[:end]
