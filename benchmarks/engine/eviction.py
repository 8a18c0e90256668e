"""Hit rate of the engine's cache of items, beside bounds: ``python -m benchmarks eviction``.

Scheduler and prefix cache are the engine's; no model runs, so thousands of requests take seconds. Popularity follows Zipf's law. It
is steady, or changes: *abrupt* gives all items new places in the middle, *drift* exchanges a few again and again. Policies:

- *engine*: what the engine does.
- *engine, families*: the same with items that begin alike, popular and rare ones. Their beginning is stored once, so more fit.
- *LRU*: the least recently used item is evicted first.
- *popularity*: the cache always has the most popular items. While draws are independent, no policy that does not know the future
  hits more often in the long run (Aho, Denning and Ullman, "Principles of optimal page replacement", Journal of the ACM 1971).
- *future*: what is used again last is evicted first (Belady 1966), with a cache that also may not keep an item.

The speed-up is that of tokens computed, beside query first. Items that occur again in a request count as found.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.engine.catalogue import LABELS, with_common_beginnings
from engine import wire
from engine.ints import Ints
from engine.kvcache.slots import SlotPool
from engine.replies.counters import Counters
from engine.replies.item_results import ItemResults
from engine.requests.core import ScoringRequest
from engine.requests.item_group import ItemGroup
from engine.scheduling.scheduler import Budget, Scheduler

Trace = Ints
"""[requests, items of a request] the items that are asked for"""

WORKING_TOKENS = 4096
"""Slots beside those of items: for queries, and for items of the step that are not cached yet."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks eviction", description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=2000, help="items of the catalogue")
    parser.add_argument("--item-tokens", type=int, default=180)
    parser.add_argument("--family", type=int, default=8, help="items that begin with the same tokens, for the second figure")
    parser.add_argument("--common-tokens", type=int, default=60, help="number of these tokens")
    parser.add_argument("--query-tokens", type=int, default=20)
    parser.add_argument("--per-request", type=int, default=100, help="items of one request")
    parser.add_argument("--room", type=float, default=0.2, help="part of the catalogue that can be cached")
    parser.add_argument("--zipf", type=float, default=0.9, help="exponent of the popularity's law")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--warm-up", type=int, default=100, help="first requests, which are not counted")
    parser.add_argument("--step-tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    report: dict[str, dict[str, float]] = {}
    room = int(options.room * options.items)
    for name, trace in traces(options).items():
        hits = {
            "engine": engine_hits(trace, options),
            "engine, families": engine_hits(trace, options, options.common_tokens),
            "LRU": lru_hits(trace, room),
            "future": future_hits(trace, room),
        }
        if name == "steady":
            hits["popularity"] = popularity_hits(trace, room)
        report[name] = {
            policy: round(float(found[options.warm_up :].mean()) / options.per_request, 3) for policy, found in hits.items()
        }
        for policy, rate in report[name].items():
            print(f"{name:<8} {policy:<16} hit rate {rate:.3f}   tokens {speed_up(rate, options):.2f} x")
    print(json.dumps(vars(options) | report))
    return 0


def speed_up(rate: float, options: argparse.Namespace) -> float:
    """Tokens computed with the query first, divided by those with items first."""
    item, query = options.item_tokens, options.query_tokens
    return float((item + query / options.per_request) / (query + (1 - rate) * item))


def traces(options: argparse.Namespace) -> dict[str, Trace]:
    """Return the requests of each kind of popularity."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, options.items + 1) ** options.zipf
    shape = options.requests, options.per_request
    ranks = rng.choice(options.items, shape, p=weights / weights.sum()).astype(np.int32)
    half, abrupt, drift = options.requests // 2, ranks.copy(), ranks.copy()
    abrupt[half:] = rng.permutation(options.items)[ranks[half:]]
    places = np.arange(options.items)
    for start in range(0, options.requests, 10):
        some = rng.choice(options.items, options.items // 50, replace=False)
        places[some] = places[rng.permutation(some)]
        drift[start : start + 10] = places[ranks[start : start + 10]]
    return {"steady": ranks, "abrupt": abrupt, "drift": drift}


def engine_hits(trace: Trace, options: argparse.Namespace, common: int = 0) -> Ints:
    """Return the items that the engine's scheduler finds, [requests]. Requests come one after another. ``common``: number of tokens
    with which the items of a family begin."""
    items = np.random.default_rng(1).integers(0, 1 << 17, (options.items, options.item_tokens)).astype("<i4")
    items = with_common_beginnings(items, options.family, common)
    slots = int(options.room * options.items) * options.item_tokens + WORKING_TOKENS
    scheduler = Scheduler(SlotPool(slots), Budget(options.step_tokens, 1), lambda: 0.0)
    results, lengths = ItemResults(scheduler, Counters()), wire.pack_ids([options.item_tokens] * options.per_request)
    found = []
    for number, places in enumerate(trace):
        message = wire.ScoreItems(str(number), items[places].tobytes(), lengths, [0] * options.query_tokens, LABELS)
        group = ItemGroup.of(message, 0.0)
        scheduler.add(group)
        while group.left:
            segments = [segment for segment in scheduler.schedule().segments if segment.completes]
            results.take(
                group, [(item, [0.0]) for item in (segment.request for segment in segments) if isinstance(item, ScoringRequest)]
            )
        found.append(group.cached_items)
    return np.array(found, np.int32)


def lru_hits(trace: Trace, room: int) -> Ints:
    """Return the items found in a cache that evicts the least recently used one, [requests]."""
    cache: dict[int, None] = {}
    found = []
    for places in trace.tolist():
        hits = 0
        for place in places:
            hits += place in cache
            cache.pop(place, None)
            cache[place] = None
            if len(cache) > room:
                del cache[next(iter(cache))]
        found.append(hits)
    return np.array(found, np.int32)


def popularity_hits(trace: Trace, room: int) -> Ints:
    """Return the items found in a cache of the ``room`` first ones, which are the most popular, [requests]."""
    return np.array(
        [sum(count - (place >= room) for place, count in Counter(places).items()) for places in trace.tolist()], np.int32
    )


def future_hits(trace: Trace, room: int) -> Ints:
    """Return the items found in a cache that evicts what is used again last, [requests]."""
    following: dict[int, int] = {}
    next_uses: list[dict[int, int]] = []
    for number, places in reversed(list(enumerate(trace.tolist()))):
        next_uses.append({place: following.get(place, len(trace)) for place in places})
        following |= dict.fromkeys(places, number)
    cache: dict[int, int] = {}
    found = []
    for places, uses in zip(trace.tolist(), reversed(next_uses), strict=True):
        found.append(sum(count - (place not in cache) for place, count in Counter(places).items()))
        cache |= uses
        cache = dict(sorted(cache.items(), key=lambda use: use[1])[:room])
    return np.array(found, np.int32)
