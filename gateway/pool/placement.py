"""Places items on replicas, so that each item's keys and values stay in the prefix cache of few replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from engine import wire
from gateway.pool.replica import Replica
from gateway.pool.weights import weight
from gateway.text.image_ids import ImageIds
from gateway.text.prepared import Ids, PlacedIds

LOAD_BOUND = 1.5
SLACK_TOKENS = 1 << 14
"""A replica may have this multiple of the mean load, and this many tokens more, before items go elsewhere. Items move late, because
an item that moves has to be computed again, and takes room in a second cache. An item that is longer than the slack has its own
length instead, so the replica with the least load is always within the bound."""


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
