"""Places prefixes and items on replicas, so that their keys and values stay in the prefix caches of few replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from engine import wire
from gateway.pool.replica import Replica
from gateway.pool.weights import weight
from gateway.text.prepared import Ids, ImageIds, PlacedIds, content_of

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


class Placement:
    """Assigns the items of one request to replicas.

    Each item goes to the replica with the largest weight of those within the load bound. A replica's weight depends on the item and
    the replica only, so a replica that joins or leaves moves only its own share (rendezvous hashing), and an item whose replica has
    too much work goes to the same second replica every time.
    """

    def __init__(self, replicas: Sequence[Replica], tokens: int) -> None:
        """``replicas``: at least one. ``tokens``: of all prompts of the request."""
        self._seeds = [replica.seed for replica in replicas]
        self._loads = [replica.tokens for replica in replicas]
        self._bound = LOAD_BOUND * (sum(self._loads) + tokens) / len(replicas)

    def choose(self, digest: int, tokens: int) -> int:
        """Return the number of the replica for the next item. ``tokens``: of its prompt."""
        if len(self._seeds) == 1:
            return 0
        pairs, most = zip(self._seeds, self._loads, strict=True), self._bound + max(0, SLACK_TOKENS - tokens)
        weights = [weight(digest, seed) if load <= most else -1 for seed, load in pairs]
        chosen = weights.index(max(weights))
        self._loads[chosen] += tokens
        return chosen


def assign(replicas: Sequence[Replica], digests: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Return the indices of the items of each replica, ascending, as a :class:`Placement` of all of them chooses."""
    placement = Placement(replicas, sum(tokens))
    groups: list[list[int]] = [[] for _ in replicas]
    for place, (digest, count) in enumerate(zip(digests, tokens, strict=True)):
        groups[placement.choose(digest, count)].append(place)
    return groups
