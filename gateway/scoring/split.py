"""How a score request is cut into messages for engines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


MESSAGE_TOKENS = 1 << 17
"""Of one sub-batch, so that encoding it takes the event loop 3 ms at most. A long prefix leaves at least half to the branches."""
MESSAGE_SCORES = 1 << 15
"""Of one sub-batch, its branches times its labels, so that decoding the answer takes the event loop 2 ms at most."""
MESSAGE_BRANCHES = 1 << 11
MANY = 1 << 10
"""Branches from which they are dealt out, which is faster than a heap and hardly less even."""


def split(
    prefix: int, lengths: Sequence[int], *, replicas: int, split_tokens: int, max_branches: int, labels: int = 1
) -> list[list[int]]:
    """The places of the branches in ``lengths`` (in tokens), as few sub-batches as use ``replicas`` well.

    Every sub-batch computes the prefix again, on its replica. So on average each has at least ``split_tokens`` of branches, and at
    least as many as the prefix is long: no more than half of the work is repeated. Their sums differ by one branch at most; none
    has more than ``max_branches`` or the bounds of a message above.
    """
    max_branches = max(1, min(max_branches, MESSAGE_BRANCHES, MESSAGE_SCORES // max(1, labels)))
    most_tokens = max(MESSAGE_TOKENS - prefix, MESSAGE_TOKENS // 2)
    worth = sum(lengths) // max(split_tokens, prefix)
    parts = balanced(lengths, max(1, min(replicas, worth, len(lengths))))
    return [run for part in parts for few in cut(part, max_branches) for run in bounded(few, lengths, most_tokens)]


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """``count`` groups of places, each in order, with sums as even as placing the longest first makes them."""
    if count == 1:
        return [list(range(len(lengths)))]
    if len(lengths) > MANY:  # to and fro over the groups, the longest first
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
    """``places`` in order, as runs of even length with at most ``most_tokens``, or of one."""
    tokens = sum(lengths[place] for place in places)
    count = math.ceil(tokens / most_tokens)
    while count > 1:
        runs = cut(places, math.ceil(len(places) / count))
        if len(runs) == len(places) or all(sum(lengths[place] for place in run) <= most_tokens for run in runs):
            return runs
        count += 1
    return [places]


def cut(asked: list[T], longest: int) -> list[list[T]]:
    """``asked`` in order, as few runs as possible of at most ``longest``, of even length."""
    if len(asked) <= longest:
        return [asked] if asked else []
    count = math.ceil(len(asked) / longest)
    bounds = [len(asked) * part // count for part in range(count + 1)]
    return [asked[start:end] for start, end in pairwise(bounds)]
