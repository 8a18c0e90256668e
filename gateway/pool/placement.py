"""Where prompts go: affinity of prefixes, placement of items, and the division of a request into sub-batches.

Prefixes and items are placed by rendezvous hashing: each goes to the replica with the largest weight. A weight depends on the
digest of the prefix or item and on the replica only, so adding or removing a replica moves only what prefers it: Thaler and
Ravishankar, https://doi.org/10.1109/90.663936.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from yardstick_llm.engine import wire
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.text.prepared import Ids, ImageIds, PlacedIds, content_of

if TYPE_CHECKING:
    from yardstick_llm.gateway.pool.replica import Replica

T = TypeVar("T")

MIN_AFFINITY = 16
"""Shortest prefix, in tokens, for which a request prefers a replica; recomputing a shorter one costs almost nothing."""
PROMPT_AFFINITY = 64
"""Prompts whose first tokens, this many, are equal prefer one replica: turns of a conversation, questions about one text. Chats
that share only the beginning of the chat template do not."""
LOAD_BOUND = 1.5
SLACK_TOKENS = 1 << 14
"""A replica may have this multiple of the mean load, and this many tokens more, before items go elsewhere. Items move late, because
an item that moves has to be computed again, and takes room in a second cache. An item that is longer than the slack has its own
length instead, so the replica with the least load is always within the bound."""
MESSAGE_TOKENS = 1 << 17
"""Most tokens of one sub-batch, up to one branch; encoding them takes the event loop at most 3 ms. A long prefix leaves at least
half to branches."""
MESSAGE_SCORES = 1 << 15
"""Most numbers (branches times the length of a row) in the answer to one sub-batch; decoding it takes the event loop at most 2 ms.
"""
MESSAGE_BRANCHES = 1 << 11

_MASK = (1 << 64) - 1
_MULTIPLIERS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Constants of SplitMix64, https://doi.org/10.1145/2714064.2660195."""


def weight(digest: int, seed: int) -> int:
    """Return the weight of the replica with ``seed``. Both are 64-bit numbers; a cryptographic hash of both takes twice as long."""
    number = (digest ^ seed) * _MULTIPLIERS[0] & _MASK
    number = (number ^ number >> 31) * _MULTIPLIERS[1] & _MASK
    return number ^ number >> 29


def affinity_of(prefix: Ids, caller: wire.Caller, adapter: str = "") -> bytes | None:
    """Return a digest of adapter and prefix, by which requests with equal prefixes reach the same replica. None for a request that
    does not use prefix caches or whose prefix is shorter than :data:`MIN_AFFINITY`."""
    if len(prefix) < MIN_AFFINITY or not caller.keep_prefix:
        return None
    return hashlib.blake2b(adapter.encode() + bytes(content_of(prefix)), digest_size=16, key=caller.cache_salt.encode()).digest()


def item_digests(items: Iterable[Ids], salt: str, adapter: str = "") -> Iterator[int]:
    """Yield a 64-bit digest of each item. Equal items of one salt and one ``adapter`` have equal digests in every gateway."""
    start = hashlib.blake2b(adapter.encode(), digest_size=8, key=salt.encode()[:64])
    salted = int.from_bytes(start.digest(), "little")
    for item in items:
        if isinstance(item, PlacedIds):
            yield item.place ^ salted
            continue
        digest = start.copy()
        digest.update(item.content if isinstance(item, ImageIds) else wire.pack_ids(item))
        yield int.from_bytes(digest.digest(), "little")


async def assign(replicas: Sequence[Replica], digests: Iterable[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of the items of each replica, ascending. ``lengths``: tokens of each item's prompt.

    Each item goes to the replica with the largest weight of those within the load bound, so an item whose replica has too much work
    goes to the same second replica every time.
    """
    if len(replicas) == 1:
        return [[*range(len(lengths))]]
    seeds, loads = [replica.seed for replica in replicas], [replica.tokens for replica in replicas]
    bound = LOAD_BOUND * (sum(loads) + sum(lengths)) / len(replicas)
    groups: list[list[int]] = [[] for _ in replicas]
    time_slice = TimeSlice()
    for place, digest in enumerate(digests):
        most = bound + max(0, SLACK_TOKENS - lengths[place])
        weights = [weight(digest, seed) if load <= most else -1 for seed, load in zip(seeds, loads, strict=True)]
        chosen = weights.index(max(weights))
        loads[chosen] += lengths[place]
        groups[chosen].append(place)
        if time_slice.over:
            await time_slice.yield_to_loop()
    return groups


def parts_of(prefix: int, tokens: int, *, usual: int, idle: int, replicas: int, idle_replicas: int) -> int:
    """Return the number of sub-batches for ``tokens`` of branches: the smallest that uses ``replicas`` well. ``usual`` is the least
    number of branch tokens of a sub-batch, and ``idle`` for the ``idle_replicas`` that compute nothing else.

    Every sub-batch computes the prefix again, on its replica. Therefore sub-batches have on average at least as many branch
    tokens as the prefix has: at most half of the work is repeated.
    """
    return max(1, min(replicas, tokens // max(usual, prefix)), min(idle_replicas, tokens // max(idle, prefix)))


def split(prefix: int, lengths: Sequence[int], parts: int, *, max_branches: int, row_length: int = 1) -> list[list[int]]:
    """Return the indices of the branches of each of ``parts`` sub-batches, ascending, or of more, so that none exceeds
    ``max_branches`` or the bounds of a message above. ``lengths`` are in tokens; their sums differ by at most one branch."""
    max_branches = max(1, min(max_branches, MESSAGE_BRANCHES, MESSAGE_SCORES // max(1, row_length)))
    most_tokens = max(MESSAGE_TOKENS - prefix, MESSAGE_TOKENS // 2)
    parts = max(parts, math.ceil(len(lengths) / max_branches), math.ceil(sum(lengths) / most_tokens))
    parts = min(parts, len(lengths))
    if parts == 1:
        return [[*range(len(lengths))]]
    # dealt out back and forth, longest first
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [sorted(order[part :: 2 * parts] + order[2 * parts - 1 - part :: 2 * parts]) for part in range(parts)]


def cut(values: list[T], longest: int) -> list[list[T]]:
    """Divide ``values``, in order, into the fewest runs of at most ``longest``, of even length."""
    if len(values) <= longest:
        return [values] if values else []
    count = math.ceil(len(values) / longest)
    bounds = [len(values) * part // count for part in range(count + 1)]
    return [values[start:end] for start, end in pairwise(bounds)]
