"""Splits a score request into messages for engines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")


MESSAGE_TOKENS = 1 << 17
"""Most tokens of one sub-batch; encoding them takes the event loop at most 3 ms. A long prefix leaves at least half to branches."""
MESSAGE_SCORES = 1 << 15
"""Most numbers (branches times the length of a row) in the answer to one sub-batch; decoding it takes the event loop at most 2 ms.
"""
MESSAGE_BRANCHES = 1 << 11
MANY = 1 << 10
"""Number of branches above which they are dealt out in turn instead of with a heap: faster, and almost as even."""


class SplitTokens(NamedTuple):
    """Least branch tokens of a sub-batch."""

    usual: int
    idle: int
    """For a replica that computes nothing else."""

    def parts(self, prefix: int, tokens: int, *, replicas: int, idle: int) -> int:
        """Return the number of sub-batches for ``tokens`` of branches: the smallest that uses ``replicas`` well, of which ``idle``
        compute nothing else.

        Every sub-batch computes the prefix again, on its replica. Therefore sub-batches have on average at least as many branch
        tokens as the prefix has: at most half of the work is repeated.
        """
        return max(1, min(replicas, tokens // max(self.usual, prefix)), min(idle, tokens // max(self.idle, prefix)))


def split(prefix: int, lengths: Sequence[int], parts: int, *, max_branches: int, row_length: int = 1) -> list[list[int]]:
    """Return the indices of the branches of each of ``parts`` sub-batches, or of more. ``lengths`` are in tokens; their sums differ
    by at most one branch. None exceeds ``max_branches`` or the bounds of a message above.
    """
    max_branches = max(1, min(max_branches, MESSAGE_BRANCHES, MESSAGE_SCORES // max(1, row_length)))
    most_tokens = max(MESSAGE_TOKENS - prefix, MESSAGE_TOKENS // 2)
    groups = balanced(lengths, max(1, min(parts, len(lengths))))
    return [run for group in groups for few in cut(group, max_branches) for run in bounded(few, lengths, most_tokens)]


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return ``count`` groups of indices, each ascending, with even sums: the longest branch goes to the smallest group."""
    if count == 1:
        return [list(range(len(lengths)))]
    if len(lengths) > MANY:  # deal the branches out back and forth over the groups, longest first
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        return [sorted(order[group :: 2 * count] + order[2 * count - 1 - group :: 2 * count]) for group in range(count)]
    heap: list[tuple[int, int]] = [(0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        tokens, group = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[place], group))
        groups[group].append(place)
    return [sorted(group) for group in groups]


def bounded(places: list[int], lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Divide ``places``, in order, into runs of even length with at most ``most_tokens`` each, or of one place."""
    tokens = sum(lengths[place] for place in places)
    count = math.ceil(tokens / most_tokens)
    while count > 1:
        runs = cut(places, math.ceil(len(places) / count))
        if len(runs) == len(places) or all(sum(lengths[place] for place in run) <= most_tokens for run in runs):
            return runs
        count += 1
    return [places]


def cut(asked: list[T], longest: int) -> list[list[T]]:
    """Divide ``asked``, in order, into the fewest runs of at most ``longest`` items, of even length."""
    if len(asked) <= longest:
        return [asked] if asked else []
    count = math.ceil(len(asked) / longest)
    bounds = [len(asked) * part // count for part in range(count + 1)]
    return [asked[start:end] for start, end in pairwise(bounds)]
