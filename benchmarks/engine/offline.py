"""Scoring, engine only: the standard workload against Hugging Face transformers, and cost per item over lengths.

Both run in this process with the same threads and weights, in turn on the same requests, and their scores must agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.engine.engines import Engine, Scorer, Stopwatch, Transformers
from benchmarks.engine.records import Records
from benchmarks.engine.subject import Subject
from benchmarks.engine.workload import Workload
from engine import wire
from engine.models.decoder import Decoder
from kernels.label_logprobs import label_logprobs


@dataclass(frozen=True)
class Sweep:
    """A sweep of one length; the other lengths are those of the standard workload."""

    name: str
    """A field of :class:`Workload`."""
    values: Sequence[int]

    def workloads(self) -> dict[int, Workload]:
        """Workloads by value."""
        return {value: Workload(**{self.name: value}) for value in self.values}


SWEEPS = (
    Sweep("items", (1, 5, 10, 20, 50, 100, 500)),
    Sweep("query", (15, 120, 500, 2000)),
    Sweep("item", (20, 60, 180, 500)),
)
QUICK_SWEEPS = (Sweep("items", (1, 10, 50)), Sweep("query", (15, 500)), Sweep("item", (20, 180)))


QUEUED = {"cpu": 2, "cuda": 40}
"""Requests queued at once."""
QUEUED_REPEATS = 3
PEER_BATCHES = {"cpu": (10,), "cuda": (10, 40, 100, 200)}
"""Prompts of a batch of transformers, whose best is reported."""


class Head:
    """The engine's last step alone, on as many rows as a request has items: it is the model's time, not the engine's."""

    def __init__(self, decoder: Decoder, workload: Workload) -> None:
        self._decoder = decoder
        weight = decoder.embed.weight
        self._hidden = torch.randn(workload.items, weight.shape[1], device=weight.device).to(weight.dtype)
        self._labels = torch.zeros(workload.items, workload.labels, dtype=torch.int64, device=weight.device)

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Run the step once."""
        return label_logprobs(self._hidden, self._decoder.head_operand, self._labels)


def compare(
    engine: Engine, decoder: Decoder, peer: Scorer, workload: Workload, vocab_size: int, repeats: int, records: Records
) -> dict[str, Any]:
    """Measure a workload, one request at a time, alternating between engine and peer on the same requests."""
    rng, head = np.random.default_rng(0), Head(decoder, workload)
    watch = Stopwatch(gpu=decoder.embed.weight.is_cuda)
    timed_head = watch.around(head.run)
    engine.score(workload.request("warm", rng, vocab_size))  # compiles kernels
    timed_head()
    apart: list[float] = []
    ours, theirs, outside = [], [], []
    with engine.timed(decoder, watch):
        for repeat in records.progress(range(repeats), "against transformers"):
            message = workload.request(f"r{repeat}", rng, vocab_size)
            watch.take()
            ours.append(records.timed("offline", "Yardstick", partial(engine.score, message)))
            timed_head()
            outside.append(1 - watch.take() / ours[-1])
            theirs.append(records.timed("offline", "transformers", partial(peer.score, message)))
            apart += differences(engine, peer, message)
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "engine_items_per_s": workload.items / statistics.median(ours),
        "transformers_items_per_s": workload.items / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "outside_model": statistics.median(outside),
        "differences": spread(apart),
        "largest_difference": max(apart),
    }


def queued(
    engine: Engine, peer: Callable[[], Transformers], workload: Workload, vocab_size: int, repeats: int, records: Records
) -> dict[str, Any]:
    """Measure many requests queued at once, in turn: in the engine, and in the peer as batches of full prompts."""
    device, rng = engine.loop._runner._decoder.embed.weight.device.type, np.random.default_rng(4)
    count = QUEUED[device]
    scorers: dict[str, Callable[[list[wire.Score]], object]] = {"engine": engine.score_all}
    for batch in PEER_BATCHES[device]:
        scorers[str(batch)] = partial(peer().score_all, batch=batch)
    rates: dict[str, list[float]] = {name: [] for name in scorers}
    for repeat in records.progress(range(repeats + 1), f"{count} requests queued"):
        messages = [workload.request(f"q{repeat}-{place}", rng, vocab_size) for place in range(count)]
        for name, score in scorers.items():
            taken = records.timed("queued", name, partial(score, messages))
            if repeat:  # the first round warms up
                rates[name].append(count * workload.items / taken)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ours, peers = middle.pop("engine"), middle
    return {"requests": count, "engine_items_per_s": ours, "transformers_items_per_s": peers, "ratio": ours / max(peers.values())}


def show_queued(found: Mapping[str, Any], measured: Subject, records: Records) -> None:
    """Print the rates of engine and peer."""
    peers = ", ".join(f"{rate:.1f} in batches of {batch}" for batch, rate in found["transformers_items_per_s"].items())
    records.console.print(
        f"{found['requests']} requests queued, {measured.format}: {found['engine_items_per_s']:.1f} items/s; transformers in "
        f"{measured.dtype} {peers} prompts; {found['ratio']:.2f} × the best of them"
    )


def differences(engine: Scorer, peer: Scorer, message: wire.Score) -> list[float]:
    """Return the absolute differences between the log-probabilities of one request."""
    return np.abs(np.subtract(engine.score(message), peer.score(message))).flatten().tolist()


def spread(apart: Sequence[float]) -> dict[str, float]:
    """Return the distribution of absolute differences."""
    values = np.array(apart)
    shares = {f"p{share}": float(np.percentile(values, share, method="inverted_cdf")) for share in (50, 90, 99)}
    return {"values": float(len(values)), "rms": float(np.sqrt((values**2).mean())), **shares, "max": float(values.max())}


def agrees(found: Mapping[str, float], tolerance: float, *, exact: bool) -> bool:
    """Whether differences of this distribution are rounding. The largest of many values in few bits is an accident, so the bound
    holds for nine tenths of them; ``exact``: for all."""
    return found["max" if exact else "p90"] <= tolerance


def sweep(engine: Engine, vocab_size: int, what: Sweep, repeats: int, records: Records) -> dict[int, float]:
    """Return the median milliseconds per item by value; the values alternate."""
    rng, workloads = np.random.default_rng(1), what.workloads()
    times: dict[int, list[float]] = {value: [] for value in workloads}
    for repeat in records.progress(range(repeats), f"by {what.name}"):
        for value, workload in workloads.items():
            message = workload.request(f"{what.name}{repeat}-{value}", rng, vocab_size)
            taken = records.timed(f"sweep {what.name}", str(value), partial(engine.score, message))
            times[value].append(taken / workload.items)
    return {value: 1000 * statistics.median(values) for value, values in times.items()}


def show_comparison(comparison: Mapping[str, Any], measured: Subject, records: Records) -> None:
    """Print the times of engine and peer."""
    table = Table(f"one request at a time, {measured.format}", "items/s", "against transformers", title="Scoring, engine only")
    spread = f"{comparison['ratio']:.2f}× ({comparison['ratio_min']:.2f}–{comparison['ratio_max']:.2f})"
    table.add_row("Yardstick", f"{comparison['engine_items_per_s']:.1f}", spread)
    table.add_row(f"transformers, one batch, {measured.dtype}", f"{comparison['transformers_items_per_s']:.1f}", "1")
    records.console.print(table)
    records.console.print(f"outside the model: {comparison['outside_model']:.1%} of the time")
    apart = comparison["differences"]
    records.console.print(
        f"difference of {apart['values']:.0f} log-probabilities: median {apart['p50']:.1e}, P90 {apart['p90']:.1e}, "
        f"P99 {apart['p99']:.1e}, largest {apart['max']:.1e}" + ("" if comparison["agrees"] else "; THE SCORES DO NOT AGREE")
    )


def show_sweep(what: Sweep, per_item: Mapping[int, float], records: Records) -> None:
    """Show costs by value."""
    heading = {"items": "items a request", "query": "tokens of the query", "item": "tokens an item"}[what.name]
    table = Table(heading, *(str(value) for value in per_item))
    table.add_row("ms an item", *(f"{value:.2f}" for value in per_item.values()))
    tokens = {value: workload.tokens / workload.items for value, workload in what.workloads().items()}
    table.add_row("µs a computed token", *(f"{1000 * taken / tokens[value]:.1f}" for value, taken in per_item.items()))
    records.console.print(table)
