"""Items on several simulated replicas: ``python -m benchmarks placement``.

The gateway's placement and the engine's prefix cache are the real ones. A replica computes the tokens that its cache lacks one
after another, at a fixed cost for each, and clients send their next request as soon as they have an answer. Popularity of items
follows Zipf's law; an item that a request names twice is sent once, as gateways do. The program prints the throughput beside one
replica, the hit rate beside one replica with as many slots as all together, and the part of the items that a further replica takes.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from engine.ints import Ints
from engine.kvcache.prefix_cache import PrefixCache
from engine.kvcache.slots import SlotPool
from gateway.pool.placement import assign, item_digests
from gateway.pool.replica import Replica


class Simulated:
    """One replica: a queue of work, and a prefix cache."""

    def __init__(self, number: int, slots: int) -> None:
        self.replica = Replica(cast("Any", SimpleNamespace(url=f"http://engine-{number}:8000")))
        self.free_at = 0.0
        """Time at which the queue is empty, in computed tokens."""
        self.hits = self.items = 0
        self._pool = SlotPool(slots)
        self._cache = PrefixCache(self._pool)

    def cost(self, item: Ints, query: int) -> int:
        """Score one item; return the number of tokens computed."""
        node, found = self._cache.match_prefix(self._cache.acquire_root(""), item)
        rest = item[len(found) :]
        self.items += 1
        self.hits += not len(rest)
        if len(rest):
            if self._pool.available < len(rest):
                self._cache.evict(len(rest) - self._pool.available)
            node = self._cache.insert(node, rest, self._pool.allocate(len(rest)), item=True)
        self._cache.release(node)
        return len(rest) + query


class Simulation:
    """Clients, replicas and a catalogue."""

    def __init__(self, options: argparse.Namespace, replicas: int, slots: int) -> None:
        rng = np.random.default_rng(0)
        weights = 1 / np.arange(1, options.items + 1) ** options.zipf
        self._items = rng.integers(0, 1 << 15, (options.items, options.item_tokens), np.int32)
        self._digests = list(item_digests((item.tolist() for item in self._items), ""))
        self._popularity = weights / weights.sum()
        self._options, self._rng = options, rng
        self.replicas = [Simulated(number, slots) for number in range(replicas)]

    def run(self, requests: int) -> float:
        """Serve ``requests``; return the items scored per computed token of time."""
        started = min(replica.free_at for replica in self.replicas)
        for each in self.replicas:
            each.hits = each.items = 0
        waiting, order = [(started, number) for number in range(self._options.clients)], itertools.count()
        running: list[tuple[float, int, Replica, int]] = []
        for _ in range(requests):
            now, client = heapq.heappop(waiting)
            while running and running[0][0] <= now:
                _, _, replica, tokens = heapq.heappop(running)
                replica.tokens -= tokens
            done = now
            for simulated, end, tokens in self._request(now):
                simulated.replica.tokens += tokens
                heapq.heappush(running, (end, next(order), simulated.replica, tokens))
                done = max(done, end)
            heapq.heappush(waiting, (done, client))
        return sum(each.items for each in self.replicas) / (max(waiting)[0] - started)

    def hit_rate(self) -> float:
        """Return the part of the items that were cached in the last run."""
        return sum(each.hits for each in self.replicas) / sum(each.items for each in self.replicas)

    def moved(self) -> float:
        """Return the part of the items that a further replica takes from idle ones."""
        idle = [Simulated(number, 1).replica for number in range(len(self.replicas) + 1)]
        lengths = [self._options.item_tokens] * len(self._digests)
        places = [owners(assign(pods, self._digests, lengths)) for pods in (idle[:-1], idle)]
        return sum(places[0][item] != places[1][item] for item in places[0]) / len(self._digests)

    def _request(self, now: float) -> list[tuple[Simulated, float, int]]:
        """Send one request; return its parts: replica, time of its answer, and tokens as the gateway counts them."""
        places = self._rng.permutation(
            np.unique(self._rng.choice(self._options.items, self._options.per_request, p=self._popularity))
        )
        query, length = self._options.query_tokens, self._options.item_tokens + self._options.query_tokens
        digests = [self._digests[place] for place in places]
        groups = assign([each.replica for each in self.replicas], digests, [length] * len(places))
        parts = []
        for each, group in zip(self.replicas, groups, strict=True):
            if group:
                cost = sum(each.cost(self._items[places[index]], query) for index in group)
                each.free_at = max(each.free_at, now) + cost
                parts.append((each, each.free_at, len(group) * length))
        return parts


def owners(groups: list[list[int]]) -> dict[int, int]:
    """Return the number of the replica of each item."""
    return {item: number for number, group in enumerate(groups) for item in group}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks placement", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--items", type=int, default=2000, help="items of the catalogue")
    parser.add_argument("--item-tokens", type=int, default=180)
    parser.add_argument("--query-tokens", type=int, default=20)
    parser.add_argument("--per-request", type=int, default=100, help="items of one request")
    parser.add_argument("--room", type=float, default=0.2, help="part of the catalogue that all replicas together can cache")
    parser.add_argument("--zipf", type=float, default=0.9, help="exponent of the popularity's law")
    parser.add_argument("--clients", type=int, default=16, help="requests in flight")
    parser.add_argument("--requests", type=int, default=600, help="measured requests, after as many that warm the caches")
    options = parser.parse_args(arguments)
    slots = int(options.room * options.items * options.item_tokens)
    found = {
        "several": Simulation(options, options.replicas, slots // options.replicas),
        "one": Simulation(options, 1, slots // options.replicas),
        "large": Simulation(options, 1, slots),
    }
    rates, hits = {}, {}
    for name, simulation in found.items():
        simulation.run(options.requests)
        rates[name], hits[name] = simulation.run(options.requests), simulation.hit_rate()
    report = {
        "throughput beside one replica of the same size": round(rates["several"] / rates["one"], 2),
        "throughput beside one replica with all slots": round(rates["several"] / rates["large"], 2),
        "hit rate": round(hits["several"], 3),
        "hit rate of one replica with all slots": round(hits["large"], 3),
        "items that a further replica takes": round(found["several"].moved(), 3),
    }
    for name, value in report.items():
        print(f"{name}: {value}")
    print(json.dumps(vars(options) | report))
    return 0
