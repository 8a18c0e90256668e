"""Scoring a catalogue: items first and kept in the prefix cache, beside query first: ``python -m benchmarks catalogue``.

A catalogue of items is scored with a new query for each request, in one process and without a gateway, ``--in-flight`` requests at
a time. Three variants answer the same requests in turn: the query first, which computes every item again; items first and none
cached; and items first with all of them in the prefix cache. Ratios are medians of the rounds' ratios. Some item-first scores are
compared with each prompt computed alone. The last line is JSON, with machine and commit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.engines import Engine
from benchmarks.engine.records import add_output, describe, opened
from benchmarks.engine.score import agrees, spread
from benchmarks.engine.subject import SHAPES, Subject, subject
from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.settings import CPU_BATCHED_TOKENS, DTYPES, GPU_BATCHED_TOKENS, KV_DTYPES, QUANTIZE

LABELS = wire.Labels([17, 42])
VARIANTS = "query first", "none cached", "all cached"
SHARE_OF_COMPUTED = 20
"""Requests in flight for each one of the variants that compute every item, which take that much longer."""
WORKING_STEPS = 2
"""Steps whose tokens have slots beside those of items: queries, and items that are not cached yet."""
RESERVED = 0.02
"""``reserved_share`` of the engine that has the whole catalogue. With the default, items leave a quarter of its slots free."""
SECONDS = 10.0
"""Time that a round must have left to begin."""


class Catalogue:
    """Items of random tokens, [items, tokens], and an engine that has cached them all beside one that has not."""

    def __init__(self, options: argparse.Namespace, model: Subject) -> None:
        self._options, self._rng = options, np.random.default_rng(1)
        self._vocab_size, decoder = model.config.vocab_size, model.load()
        self.items = self._rng.integers(0, self._vocab_size, (options.items, options.item_tokens), np.int32)
        step = options.max_batched_tokens or (GPU_BATCHED_TOKENS if torch.cuda.is_available() else CPU_BATCHED_TOKENS)
        working, request = WORKING_STEPS * step, options.per_request * (options.item_tokens + options.query_tokens)
        both: dict[str, Any] = {"max_batched_tokens": step, "kv_dtype": model.kv_dtype}
        self.plain = Engine(decoder, model.dtype, max_total_tokens=max(2 * request, working), **both)
        whole: dict[str, Any] = {"max_total_tokens": int(self.items.size / (1 - RESERVED)) + working, "reserved_share": RESERVED}
        self.whole = Engine(decoder, model.dtype, **both, **whole)
        query = self.query()[:1]
        for begin in range(0, options.items, options.per_request):
            places = np.arange(begin, min(begin + options.per_request, options.items), dtype=np.int32)
            self.whole.run([self.items_first("warm", query, places)])

    def query(self) -> Ints:
        """Return a new query."""
        query: Ints = self._rng.integers(0, self._vocab_size, self._options.query_tokens, np.int32)
        return query

    def places(self) -> Ints:
        """Return the places of the items of one request."""
        places: Ints = self._rng.choice(self._options.items, self._options.per_request, replace=False).astype(np.int32)
        return places

    def query_first(self, name: str, query: Ints, places: Ints) -> wire.Score:
        """Return a request that computes every item."""
        return wire.Score(name, query.tolist(), self.items[places].tolist(), LABELS)

    def items_first(self, name: str, query: Ints, places: Ints, *, keep: bool = True) -> wire.ScoreItems:
        """Return a request whose items are prefixes, which ``keep`` leaves in the cache."""
        lengths = wire.pack_ids([self.items.shape[1]] * len(places))
        items, caller = self.items[places].astype("<i4").tobytes(), wire.Caller(keep_prefix=keep)
        return wire.ScoreItems(name, items, lengths, query.tolist(), LABELS, caller=caller)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks catalogue", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small", help="shape of the random model")
    parser.add_argument("--items", type=int, default=2000, help="items of the catalogue")
    parser.add_argument("--item-tokens", type=int, default=180)
    parser.add_argument("--query-tokens", type=int, default=20)
    parser.add_argument("--per-request", type=int, default=100, help="items of one request")
    parser.add_argument("--in-flight", type=int, default=1, help="requests at a time (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    parser.add_argument("--quantize", choices=QUANTIZE, help="what the layers' matrix products compute in (--dtype)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values")
    parser.add_argument("--max-batched-tokens", type=int, help="tokens of a step (the engine's default)")
    parser.add_argument("--models", type=Path, help="folder in which random weights are kept for other runs")
    parser.add_argument("--rounds", type=int, default=5)
    one_core = "1: on one core, in processor time, which other processes hardly change"
    parser.add_argument("--threads", type=int, default=0, help=one_core)
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    records, rates, ratios = opened(options), dict[str, list[float]](), dict[str, list[float]]()
    with subject(options.shape, None, options.dtype, options.quantize, options.models) as model:
        model = replace(model, kv_dtype=options.kv_dtype)
        catalogue = Catalogue(options, model)
        for number in range(options.rounds):
            work = partial(one_round, catalogue, options, model, number)
            times = records.store.measure(f"round {number}", SECONDS, work)
            if not times:
                break
            for name in VARIANTS[1:]:
                ratios.setdefault(name, []).append(times[VARIANTS[0]] / times[name])
            for name in VARIANTS:
                rates.setdefault(name, []).append(1 / times[name])
            print(f"round {number}: " + ", ".join(f"{name} {rates[name][-1]:.1f} items/s" for name in rates), file=sys.stderr)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    summary = settings | {"limit": None, "machine": describe(), "left_out": records.store.left_out}
    summary |= {f"{name}, items/s": round(statistics.median(values), 1) for name, values in rates.items()}
    for name, values in ratios.items():
        summary |= {f"{name}, ratio": round(statistics.median(values), 2), f"{name}, least ratio": round(min(values), 2)}
        summary[f"{name}, greatest ratio"] = round(max(values), 2)
    records.finish(summary)
    return 0


def one_round(catalogue: Catalogue, options: argparse.Namespace, model: Subject, number: int) -> dict[str, float]:
    """Return the seconds an item of each variant."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    asked = [(f"{number}-{at}", catalogue.query(), catalogue.places()) for at in range(options.in_flight)]
    few = asked[: -(-options.in_flight // SHARE_OF_COMPUTED)]
    times: dict[str, float] = {}

    def run(name: str, engine: Engine, messages: Sequence[wire.Score | wire.ScoreItems]) -> list[wire.Scored]:
        began = clock()
        replies = engine.run(messages)
        times[name] = (clock() - began) / (len(messages) * options.per_request)
        return [reply for reply in replies if isinstance(reply, wire.Scored)]

    run("query first", catalogue.plain, [catalogue.query_first(*one) for one in few])
    run("none cached", catalogue.plain, [catalogue.items_first(*one, keep=False) for one in few])
    known = run("all cached", catalogue.whole, [catalogue.items_first(*one) for one in asked])
    assert [reply.cached_items for reply in known] == [options.per_request] * options.in_flight
    name, query, places = asked[0]
    scored = next(reply for reply in known if reply.id == name)
    apart: list[float] = []
    for row, place in zip(scored.rows, places[:3], strict=False):
        prompt = [*catalogue.items[place].tolist(), *query.tolist()]
        apart += np.abs(np.subtract(row, catalogue.plain.score(wire.Score("alone", [], [prompt], LABELS))[0])).tolist()
    assert agrees(spread(apart), model.tolerance, exact=model.is_exact), apart
    return times
