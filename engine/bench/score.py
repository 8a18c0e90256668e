"""Scoring, engine only: the standard workload against Hugging Face transformers, and cost per item over request sizes.

The peer computes each request's full prompts as one padded batch and only the last position's logits, which is the best that it
does without sharing the query. Both run in this process with the same threads and weights, in turn, and their scores must agree.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine import wire
from engine.bench import machine
from engine.build import assemble
from engine.loop import Loop
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import save_model
from engine.models.rope import Rope
from engine.settings import EngineSettings

TOLERANCE = 1e-4
"""Of a log-probability."""
SIZES = (5, 10, 20, 50, 100, 200, 500)
"""Items a request of the sweep."""
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_context=40_960,
    rope=Rope(1_000_000.0),
    tied=True,
    qk_norm=True,
)


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens."""

    query: int = 120
    item: int = 180
    items: int = 10
    labels: int = 2

    @property
    def tokens(self) -> int:
        """That must be computed: the query once, every item once."""
        return self.query + self.items * self.item

    def request(self, name: str, rng: np.random.Generator) -> wire.Score:
        """One request of random token ids; no two share any text."""

        def tokens(*shape: int) -> Any:
            return rng.integers(0, CONFIG.vocab_size, shape).tolist()

        return wire.Score(name, tokens(self.query), tokens(self.items, self.item), tokens(self.labels))


def random_decoder(seed: int = 0) -> Decoder:
    """Random weights of the benchmark's shape, scaled so that activations stay near one."""
    torch.manual_seed(seed)
    decoder = Decoder(CONFIG)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.05 if "embed" in name else parameter.shape[1] ** -0.5)
    return decoder.eval()


class Engine:
    """The loop, driven in this process, with the time of its forward passes kept apart."""

    def __init__(self, decoder: Decoder, slots: int = 65_536) -> None:
        settings = EngineSettings(model="bench", name="bench", max_tokens_in_cache=slots)
        self.loop: Loop = assemble(decoder, settings, "bench")
        self.forward_seconds = 0.0
        forward = decoder.forward

        def timed(*arguments: Any) -> torch.Tensor:
            start = time.perf_counter()
            result = forward(*arguments)
            self.forward_seconds += time.perf_counter() - start
            return result

        decoder.forward = timed  # type: ignore[assignment, method-assign]

    def score(self, message: wire.Score) -> list[list[float]]:
        """Run one request to its end."""
        self.loop.submit(message)
        replies: list[wire.Reply] = []
        while not self.loop.idle:
            replies += self.loop.step()
        (reply,) = replies
        assert isinstance(reply, wire.Scored), reply
        return reply.logprobs


class Transformers:
    """The peer."""

    def __init__(self, decoder: Decoder) -> None:
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as directory:
            save_model(decoder, CONFIG, Path(directory))
            self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")

    @torch.inference_mode()
    def score(self, message: wire.Score) -> list[list[float]]:
        """All prompts as one batch; they are of one length, so nothing is wasted on padding."""
        prompts = torch.tensor([message.prefix + branch for branch in message.branches])
        logits = self._model(prompts, logits_to_keep=1, use_cache=False).logits[:, -1].float()
        return logits.log_softmax(-1)[:, message.labels].tolist()  # type: ignore[no-any-return]


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(engine: Engine, peer: Transformers, repeats: int, console: Console) -> dict[str, float]:
    """The standard workload, engine and peer in turn on the same requests."""
    workload, rng = Workload(), np.random.default_rng(0)
    worst = difference(engine, peer, workload.request("warm", rng))
    ours, theirs = [], []
    engine.forward_seconds = 0.0
    for repeat in track(range(repeats), "against transformers", console=console, transient=True):
        message = workload.request(f"r{repeat}", rng)
        ours.append(seconds(partial(engine.score, message)))
        theirs.append(seconds(partial(peer.score, message)))
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "engine_items_per_s": workload.items / statistics.median(ours),
        "transformers_items_per_s": workload.items / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "outside_decoder": 1 - engine.forward_seconds / sum(ours),
        "largest_difference": worst,
    }


def difference(engine: Engine, peer: Transformers, message: wire.Score) -> float:
    """Between the log-probabilities of one request, at most."""
    return float(np.abs(np.subtract(engine.score(message), peer.score(message))).max())


def sweep(engine: Engine, repeats: int, console: Console) -> dict[int, float]:
    """Milliseconds an item by items a request, medians, the sizes taken in turn."""
    rng = np.random.default_rng(1)
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for repeat in track(range(repeats), "by items a request", console=console, transient=True):
        for size in SIZES:
            message = Workload(items=size).request(f"s{repeat}-{size}", rng)
            times[size].append(seconds(partial(engine.score, message)) / size)
    return {size: 1000 * statistics.median(values) for size, values in times.items()}


def main(repeats: int) -> None:
    """Print the tables and the JSON line."""
    console = Console(stderr=True)
    decoder = random_decoder()
    peer = Transformers(decoder)
    engine = Engine(decoder)
    comparison = compare(engine, peer, repeats, console)
    assert comparison["largest_difference"] <= TOLERANCE, "scores differ from the peer's"
    per_item = sweep(engine, max(3, repeats // 5), console)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    _print(comparison, per_item)
    record = {"bench": "score", "machine": machine.describe(), **comparison, "ms_per_item": per_item, "peak_rss_mib": memory}
    print(json.dumps(record))


def _print(comparison: dict[str, float], per_item: dict[int, float]) -> None:
    console = Console()
    table = Table("120/180/10, float32", "items/s", "against transformers", title="Scoring, engine only")
    spread = f"{comparison['ratio']:.2f}× ({comparison['ratio_min']:.2f}–{comparison['ratio_max']:.2f})"
    table.add_row("Yardstick", f"{comparison['engine_items_per_s']:.1f}", spread)
    table.add_row("transformers, one batch", f"{comparison['transformers_items_per_s']:.1f}", "1")
    console.print(table)
    console.print(f"outside the decoder's layers (the head among it): {comparison['outside_decoder']:.1%} of the time")
    console.print(f"largest difference of a log-probability: {comparison['largest_difference']:.1e}")
    sizes = Table("items a request", *(str(size) for size in per_item))
    sizes.add_row("ms an item", *(f"{value:.2f}" for value in per_item.values()))
    tokens = {size: Workload(items=size).tokens / size for size in per_item}
    sizes.add_row("µs a computed token", *(f"{1000 * value / tokens[size]:.1f}" for size, value in per_item.items()))
    console.print(sizes)
