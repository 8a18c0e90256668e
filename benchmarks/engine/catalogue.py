"""Scoring a catalogue: items first and kept in the prefix cache, beside query first: ``python -m benchmarks catalogue``.

A catalogue of items is scored with a new query for each request, in one process and without a gateway. Four variants answer the
same requests in turn: the query first, which computes every item again; items first and none cached; items first with room for the
whole catalogue; and items first with room for a part of it, where popularity follows Zipf's law. The caches are warm when the
measurement begins; requests of the third variant name items of which it has computed the keys and values before. All but the second
also answer with the readout of ``/v1/rerank``, the logits of the labels alone. Ratios are medians of the rounds' ratios. The
expected ratio of the last variant follows from its hit rate and from the times of cached items and of those that are not. Some
item-first scores are compared with each prompt computed alone. The last line is JSON, with machine and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.engine import machine
from benchmarks.engine.engines import Engine
from benchmarks.engine.subject import SHAPES, Subject, subject
from engine import wire
from engine.ints import Ints, as_ints
from engine.kvcache.prefix_cache import PrefixCache

LABELS = wire.Labels([17, 42])
LOGITS = wire.Labels([17, 42], raw=True)
KINDS = "", ", logits"
VARIANTS = "query first", "none cached", "all cached", "part cached"
EXPECTED = "part cached, expected"
KEEPS, KEEPS_NOTHING = wire.Caller(), wire.Caller(keep_prefix=False)
WORKING_TOKENS = 4096
"""Slots beside those of items: for queries, and for items of the step that are not cached yet."""


@dataclass(frozen=True)
class Catalogue:
    """Items of random tokens, and how often each is asked for."""

    items: Ints
    """[items, tokens]"""
    popularity: np.ndarray[tuple[int], np.dtype[np.float64]]
    """[items] probability of each."""

    @classmethod
    def of(cls, options: argparse.Namespace, vocab_size: int) -> Catalogue:
        """Create the items. The most popular one comes first."""
        rng = np.random.default_rng(0)
        weights = 1 / np.arange(1, options.items + 1) ** options.zipf
        items = rng.integers(0, vocab_size, (options.items, options.item_tokens), np.int32)
        return cls(with_common_beginnings(items, options.family, options.common_tokens), weights / weights.sum())

    def query_first(self, name: str, query: Ints, places: Ints, readout: wire.Labels = LABELS) -> wire.Score:
        """Return a request that computes every item."""
        return wire.Score(name, query.tolist(), self.items[places].tolist(), readout)

    def items_first(
        self, name: str, query: Ints, places: Ints, readout: wire.Labels = LABELS, caller: wire.Caller = KEEPS
    ) -> wire.ScoreItems:
        """Return a request whose items are prefixes."""
        lengths = wire.pack_ids([self.items.shape[1]] * len(places))
        return wire.ScoreItems(name, self.items[places].astype("<i4").tobytes(), lengths, query.tolist(), readout, caller=caller)


def with_common_beginnings(items: Ints, family: int, tokens: int) -> Ints:
    """Give items, [items, tokens], the first ``tokens`` of another item, so that ``family`` of them begin alike, popular and rare
    ones."""
    families = -(-len(items) // max(1, family))
    items[:, :tokens] = items[np.arange(len(items)) % families, :tokens]
    return items


class Variants:
    """The engines of the three variants, warm."""

    def __init__(self, catalogue: Catalogue, options: argparse.Namespace, model: Subject) -> None:
        decoder = model.load()
        tokens, per_request = options.item_tokens, options.per_request * (options.item_tokens + options.query_tokens)
        room = int(options.room * options.items) * tokens
        self._catalogue, self._options = catalogue, options
        self._rng = np.random.default_rng(1)
        self.vocab_size = model.config.vocab_size
        self.plain = Engine(decoder, model.dtype, slots=2 * per_request)
        self.whole = Engine(decoder, model.dtype, slots=options.items * tokens + WORKING_TOKENS)
        self.part = Engine(decoder, model.dtype, slots=room + WORKING_TOKENS)
        query = self.query()[:1]
        only_schedule(self.part, [catalogue.items_first("warm", query, self.popular(), LOGITS) for _ in range(options.warm_up)])
        kept = [place for place, item in enumerate(catalogue.items) if cache_of(self.part).matched_length("", item)]
        others = self._rng.choice(options.items, options.per_request, replace=False)
        self._known = np.union1d(kept, others).astype(np.int32)
        """Items that the third variant has computed: those that the last variant keeps, and others."""
        for begin in range(0, self._known.size, options.per_request):
            places = self._known[begin : begin + options.per_request]
            self.whole.run([catalogue.items_first("warm", query, places, LOGITS)])
        copy_items(self.part, self.whole, catalogue.items[kept])

    def query(self) -> Ints:
        """Return a new query."""
        query: Ints = self._rng.integers(0, self.vocab_size, self._options.query_tokens, np.int32)
        return query

    def popular(self) -> Ints:
        """Return the places of the items of one request, drawn by popularity; an item may occur twice."""
        count = self._options.per_request
        places: Ints = self._rng.choice(self._options.items, count, p=self._catalogue.popularity).astype(np.int32)
        return places

    def any(self) -> Ints:
        """Return the places of the items of one request, all of them known to the third variant."""
        places: Ints = self._rng.choice(self._known, self._options.per_request, replace=False)
        return places


def cache_of(engine: Engine) -> PrefixCache:
    """Return the prefix cache of an engine."""
    return engine.loop._scheduler.cache


def only_schedule(engine: Engine, asked: Sequence[wire.ScoreItems]) -> None:
    """Bring the prefix cache into the state after many requests, within seconds: the model does not run, so the keys and values of
    what is cached then are still missing."""
    runner, size = engine.loop._runner, engine.loop._runner._decoder.config.hidden_size
    runner._forward = lambda tokens, positions, segments, rows: torch.zeros(len(rows), size)  # type: ignore[method-assign]  # noqa: ARG005
    for message in asked:
        engine.run([message])
    del runner._forward


def copy_items(engine: Engine, source: Engine, items: Ints) -> None:
    """Copy the keys and values of the parts of ``items`` that ``engine`` has from ``source``, which has all of each."""
    into, of = (each.loop._runner._attention.kv for each in (engine, source))
    for item in items:
        own = cache_of(engine).find("", item[: cache_of(engine).matched_length("", item)])
        found = cache_of(source).find("", item)
        if own is not None and found is not None:  # else another item, with the same first tokens, has all that is cached of it
            slots, theirs = as_ints(own[1]), as_ints(found[1])
            into.keys[:, slots], into.values[:, slots] = of.keys[:, theirs[: slots.size]], of.values[:, theirs[: slots.size]]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks catalogue", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small", help="shape of the random model")
    parser.add_argument("--items", type=int, default=2000, help="items of the catalogue")
    parser.add_argument("--item-tokens", type=int, default=180)
    parser.add_argument("--family", type=int, default=8, help="items that begin with the same tokens")
    parser.add_argument("--common-tokens", type=int, default=0, help="number of these tokens")
    parser.add_argument("--query-tokens", type=int, default=20)
    parser.add_argument("--per-request", type=int, default=100, help="items of one request")
    parser.add_argument("--room", type=float, default=0.2, help="part of the catalogue that the last variant can cache")
    parser.add_argument("--zipf", type=float, default=0.9, help="exponent of the popularity's law")
    parser.add_argument("--warm-up", type=int, default=400, help="requests before the measurement, of the last variant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=0, help="1: on one core, in processor time, which other processes hardly change"
    )
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    with subject(options.shape, None, "float32") as model:
        catalogue = Catalogue.of(options, model.config.vocab_size)
        variants = Variants(catalogue, options, model)
        print(f"warm after {time.process_time():.0f} s of processor time", file=sys.stderr)
        report = measure(catalogue, variants, options)
    print(json.dumps(vars(options) | {"machine": machine.describe()} | report))
    return 0


def measure(catalogue: Catalogue, variants: Variants, options: argparse.Namespace) -> dict[str, float]:
    """Return medians: items a second of each variant, ratios to the query first, and the hit rate of the last variant."""
    rates: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    hits: list[float] = []
    clock = time.process_time if options.threads == 1 else time.perf_counter

    def seconds(engine: Engine, message: wire.Score | wire.ScoreItems, replies: list[wire.Reply]) -> float:
        began = clock()
        replies += engine.run([message])
        return clock() - began

    for number in range(options.rounds):
        query, places, others = variants.query(), variants.any(), variants.popular()
        replies: list[wire.Reply] = []
        times, popular = {}, [variants.popular(), variants.popular()]
        for readout, kind, asked in zip((LABELS, LOGITS), KINDS, popular, strict=True):
            times[f"query first{kind}"] = seconds(variants.plain, catalogue.query_first("first", query, places, readout), [])
            for name, engine, chosen, caller in (
                ("none cached", variants.plain, others, KEEPS_NOTHING),
                ("all cached", variants.whole, places, KEEPS),
                ("part cached", variants.part, asked, KEEPS),
            ):
                message = catalogue.items_first(f"i{number}", query, chosen, readout, caller)
                times[f"{name}{kind}"] = seconds(engine, message, replies if engine is variants.part else [])
        for reply in replies:
            assert isinstance(reply, wire.Scored)
            hits.append(reply.cached_items / len(reply.rows))
        check(catalogue, variants, query, popular[0][:3], replies[0])
        for name, taken in times.items():
            rates.setdefault(name, []).append(options.per_request / taken)
        for kind, hit in zip(KINDS, hits[-2:], strict=True):
            first, none, whole, part = (times[f"{name}{kind}"] for name in VARIANTS)
            found = {"none cached": none, "all cached": whole, "part cached": part, EXPECTED: hit * whole + (1 - hit) * none}
            for name, taken in found.items():
                ratios.setdefault(f"{name}{kind}", []).append(first / taken)
        print(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:.1f} items/s" for name in rates), file=sys.stderr)
    report = {f"{name}, items/s": round(statistics.median(values), 1) for name, values in rates.items()}
    for name, values in ratios.items():
        report |= {f"{name}, ratio": round(statistics.median(values), 2), f"{name}, least ratio": round(min(values), 2)}
        report[f"{name}, greatest ratio"] = round(max(values), 2)
    return report | {"hit rate, part cached": round(statistics.mean(hits), 3)}


def check(catalogue: Catalogue, variants: Variants, query: Ints, places: Ints, scored: wire.Reply) -> None:
    """Raise :class:`AssertionError` unless the first rows equal the scores of each prompt alone."""
    assert isinstance(scored, wire.Scored)
    for row, place in zip(scored.rows, places, strict=False):
        prompt = [*catalogue.items[place].tolist(), *query.tolist()]
        alone = variants.plain.score(wire.Score("alone", [], [prompt], LABELS))
        torch.testing.assert_close(torch.tensor(row), torch.tensor(alone[0]), atol=1e-4, rtol=0)
