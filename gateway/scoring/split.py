"""How a score request is cut into messages for engines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def split(prefix: int, lengths: Sequence[int], *, replicas: int, split_tokens: int, max_branches: int) -> list[list[int]]:
    """The places of the branches in ``lengths`` (in tokens), as few sub-batches as use ``replicas`` well.

    Every sub-batch computes the prefix again, on its replica. So on average each has at least ``split_tokens`` of branches, and at
    least as many as the prefix is long: no more than half of the work is repeated. Their sums differ by one branch at most; none
    has more than ``max_branches``.
    """
    worth = sum(lengths) // max(split_tokens, prefix)
    parts = balanced(lengths, max(1, min(replicas, worth, len(lengths))))
    return [run for part in parts for run in cut(part, max_branches)]


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """``count`` groups of places, each in order, with sums as even as placing the longest first makes them."""
    heap: list[tuple[int, int]] = [(0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        tokens, group = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[place], group))
        groups[group].append(place)
    return [sorted(group) for group in groups]


def cut(asked: list[T], longest: int) -> list[list[T]]:
    """``asked`` in order, as few runs as possible of at most ``longest``, of even length."""
    count = math.ceil(len(asked) / longest)
    bounds = [len(asked) * part // count for part in range(count + 1)]
    return [asked[start:end] for start, end in pairwise(bounds)]
