"""Scoring a catalogue: items first and kept in the prefix cache, beside query first: ``python -m benchmarks catalogue``.

A catalogue of items is scored with a new query for each request, in one process and without a gateway, ``--in-flight`` requests at
a time. Four variants answer the same requests in turn: the query first, which computes every item again; items first and none
cached; items first with room for the whole catalogue; and items first with room for a part of it, where popularity follows Zipf's
law; ``--room 0`` leaves the last one out. The caches are warm when the measurement begins; requests of the third variant name items
of which it has computed the keys and values before. All but the second also answer with the readout of ``/v1/rerank``, the logits
of the labels alone. Ratios are medians of the rounds' ratios. The expected ratio of the last variant follows from its hit rate and
from the times of cached items and of those that are not. Some item-first scores are compared with each prompt computed alone. The
last line is JSON, with machine and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import machine
from benchmarks.engine.cli import add_output
from benchmarks.engine.engines import Engine
from benchmarks.engine.offline import agrees, spread
from benchmarks.engine.records import Records
from benchmarks.engine.store import Store
from benchmarks.engine.subject import SHAPES, Subject, subject
from engine import wire
from engine.ints import Ints, as_ints
from engine.kvcache.prefix_cache import PrefixCache
from engine.settings import CPU_BATCHED_TOKENS, DTYPES, GPU_BATCHED_TOKENS, QUANTIZE

LABELS = wire.Labels([17, 42])
LOGITS = wire.Labels([17, 42], raw=True)
KINDS = "", ", logits"
VARIANTS = "query first", "none cached", "all cached", "part cached"
EXPECTED = "part cached, expected"
KEEPS, KEEPS_NOTHING = wire.Caller(), wire.Caller(keep_prefix=False)
SHARE_OF_COMPUTED = 20
"""Requests in flight for each one of the variants that compute every item, which take that much longer."""
WORKING_STEPS = 2
"""Steps whose tokens have slots beside those of items: queries, and items that are not cached yet."""
RESERVED = 0.02
"""``reserved_share`` of the engine that has the whole catalogue. With the default, items leave a quarter of its slots free."""
SECONDS = 10.0
"""Time that a round must have left to begin."""


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
        step = options.max_batched_tokens or (GPU_BATCHED_TOKENS if torch.cuda.is_available() else CPU_BATCHED_TOKENS)
        working = WORKING_STEPS * step
        self._catalogue, self._options = catalogue, options
        self._rng = np.random.default_rng(1)
        self.vocab_size = model.config.vocab_size
        self.plain = Engine(decoder, model.dtype, slots=max(2 * per_request, working), max_batched_tokens=step)
        whole = int(options.items * tokens / (1 - RESERVED)) + working
        self.whole = Engine(decoder, model.dtype, slots=whole, max_batched_tokens=step, reserved_share=RESERVED)
        self.part = Engine(decoder, model.dtype, slots=room + working, max_batched_tokens=step) if room else None
        query, kept = self.query()[:1], list[int]()
        if self.part is not None:
            only_schedule(self.part, [catalogue.items_first("warm", query, self.popular(), LOGITS) for _ in range(options.warm_up)])
            kept = [place for place, item in enumerate(catalogue.items) if cache_of(self.part).matched_length("", item)]
        known = options.items if self.part is None else options.per_request
        others = self._rng.choice(options.items, known, replace=False)
        self._known = np.union1d(kept, others).astype(np.int32)
        """Items that the third variant has computed: those that the last one keeps, and others; all without the last one."""
        for begin in range(0, self._known.size, options.per_request):
            places = self._known[begin : begin + options.per_request]
            self.whole.run([catalogue.items_first("warm", query, places, LOGITS)])
        if self.part is not None:
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
    weight = runner._decoder.embed.weight
    runner._forward = lambda tokens, positions, segments, rows: weight.new_zeros(len(rows), size)  # type: ignore[method-assign]  # noqa: ARG005
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
    parser.add_argument("--in-flight", type=int, default=1, help="requests at a time (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    parser.add_argument("--quantize", choices=QUANTIZE, help="what the layers' matrix products compute in (--dtype)")
    parser.add_argument("--max-batched-tokens", type=int, help="tokens of a step (the engine's default)")
    parser.add_argument("--models", type=Path, help="folder in which random weights are kept for other runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=0, help="1: on one core, in processor time, which other processes hardly change"
    )
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    records = Records(Store(options.out, resume=options.resume, limit=options.limit))
    with subject(options.shape, None, options.dtype, options.quantize, options.models) as model:
        catalogue = Catalogue.of(options, model.config.vocab_size)
        variants = Variants(catalogue, options, model)
        print(f"warm after {time.process_time():.0f} s of processor time", file=sys.stderr)
        report = measure(catalogue, variants, options, model, records.store)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    summary = settings | {"limit": None, "machine": machine.describe(), "left_out": records.store.left_out} | report
    if options.out is not None:
        records.write(options.out, summary)
    print(json.dumps(summary))
    return 0


def measure(
    catalogue: Catalogue, variants: Variants, options: argparse.Namespace, model: Subject, store: Store
) -> dict[str, float]:
    """Return medians: items a second of each variant, ratios to the query first, and the hit rate of the last variant."""
    rates: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    hits: list[float] = []
    for number in range(options.rounds):
        found = store.measure(f"round {number}", SECONDS, partial(one_round, catalogue, variants, options, model, number))
        if not found:
            break
        times = found["seconds_an_item"]
        hits += found["hits"].values()
        for name, taken in times.items():
            rates.setdefault(name, []).append(1 / taken)
        for kind in KINDS:
            first, none, whole = (times[f"{name}{kind}"] for name in VARIANTS[:3])
            compared = {"none cached": none, "all cached": whole}
            if kind in found["hits"]:
                hit = found["hits"][kind]
                compared |= {"part cached": times[f"part cached{kind}"], EXPECTED: hit * whole + (1 - hit) * none}
            for name, taken in compared.items():
                ratios.setdefault(f"{name}{kind}", []).append(first / taken)
        print(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:.1f} items/s" for name in rates), file=sys.stderr)
    report = {f"{name}, items/s": round(statistics.median(values), 1) for name, values in rates.items()}
    for name, values in ratios.items():
        report |= {f"{name}, ratio": round(statistics.median(values), 2), f"{name}, least ratio": round(min(values), 2)}
        report[f"{name}, greatest ratio"] = round(max(values), 2)
    return report | ({"hit rate, part cached": round(statistics.mean(hits), 3)} if hits else {})


def one_round(
    catalogue: Catalogue, variants: Variants, options: argparse.Namespace, model: Subject, number: int
) -> dict[str, dict[str, float]]:
    """Return the seconds an item of each variant, and the hit rates of the last variant."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    queries, places, others = (
        [draw() for _ in range(options.in_flight)] for draw in (variants.query, variants.any, variants.popular)
    )
    few = -(-options.in_flight // SHARE_OF_COMPUTED)
    times: dict[str, float] = {}
    hits: dict[str, float] = {}

    def run(name: str, engine: Engine, messages: Sequence[wire.Score | wire.ScoreItems]) -> list[wire.Reply]:
        began = clock()
        replies = engine.run(messages)
        times[name] = (clock() - began) / (len(messages) * options.per_request)
        return replies

    for readout, kind in zip((LABELS, LOGITS), KINDS, strict=True):

        def items_first(chosen: Sequence[Ints], caller: wire.Caller, readout: wire.Labels = readout) -> list[wire.ScoreItems]:
            pairs = enumerate(zip(queries, chosen, strict=False))
            return [catalogue.items_first(f"i{number}-{at}", query, which, readout, caller) for at, (query, which) in pairs]

        asked = [variants.popular() for _ in range(options.in_flight)]
        pairs = enumerate(zip(queries, places[:few], strict=False))
        run(
            f"query first{kind}",
            variants.plain,
            [catalogue.query_first(f"f{at}", query, which, readout) for at, (query, which) in pairs],
        )
        run(f"none cached{kind}", variants.plain, items_first(others[:few], KEEPS_NOTHING))
        known = run(f"all cached{kind}", variants.whole, items_first(places, KEEPS))
        assert all(isinstance(reply, wire.Scored) and reply.cached_items == len(reply.rows) for reply in known)
        scored, which = known, places
        if variants.part is not None:
            scored, which = run(f"part cached{kind}", variants.part, items_first(asked, KEEPS)), asked
            found = [reply for reply in scored if isinstance(reply, wire.Scored)]
            hits[kind] = sum(reply.cached_items for reply in found) / sum(len(reply.rows) for reply in found)
        if readout is LABELS:
            first = next(reply for reply in scored if reply.id == f"i{number}-0")
            check(catalogue, variants, queries[0], which[0][:3], first, model)
    return {"seconds_an_item": times, "hits": hits}


def check(catalogue: Catalogue, variants: Variants, query: Ints, places: Ints, scored: wire.Reply, model: Subject) -> None:
    """Raise :class:`AssertionError` unless the first rows equal the scores of each prompt alone."""
    assert isinstance(scored, wire.Scored)
    apart: list[float] = []
    for row, place in zip(scored.rows, places, strict=False):
        prompt = [*catalogue.items[place].tolist(), *query.tolist()]
        alone = variants.plain.score(wire.Score("alone", [], [prompt], LABELS))
        apart += np.abs(np.subtract(row, alone[0])).tolist()
    assert agrees(spread(apart), model.tolerance, exact=model.is_exact), apart
