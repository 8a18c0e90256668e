"""Measures the gain of each optimisation: a straightforward variant in plain PyTorch against the engine, on the same requests.

Three baselines each omit one optimisation from a plain prefill of the full prompts, and are otherwise as fast as possible, so the
difference is the cost of that omission. All variants are correct: their scores are compared with the engine's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine.engines import Engine, Scorer, Scores, seconds
from benchmarks.engine.offline import agrees, spread
from benchmarks.engine.records import Records
from benchmarks.engine.workload import Workload
from engine import wire
from engine.models.decoder import Attend, Decoder

YARDSTICK = "Yardstick"
PLAIN = "plain prefill"
PIPELINE = 8
"""Requests queued at once for comparing the overlapped loop with the plain one."""


class Plain:
    """Runs a request's full prompts through the model as one batch, and the last position of each through the head."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.device = decoder.embed.weight.device

    @torch.inference_mode()
    def score(self, message: wire.Score) -> Scores:
        """Score a request. Subclasses do additional work in :meth:`finish`."""
        prompts = torch.tensor([message.prefix + branch for branch in message.branches], device=self.device)
        kept: list[tuple[Tensor, Tensor]] = []
        hidden = self.forward(prompts, 0, self.attend(len(prompts), kept))
        assert isinstance(message.readout, wire.Labels)
        return self.finish(hidden, message.readout.tokens, kept)

    def forward(self, tokens: Tensor, start: int, attend: Attend) -> Tensor:
        """tokens: [items, length], the first at position ``start``. -> [items, length, hidden]"""
        positions = torch.arange(start, start + tokens.shape[1], device=self.device).repeat(len(tokens))
        return self.decoder(tokens.flatten(), positions, attend).view(*tokens.shape, -1)  # type: ignore[no-any-return]

    def attend(self, items: int, kept: list[tuple[Tensor, Tensor]]) -> Attend:
        """Return causal attention within each prompt; keys and values go to ``kept``, one pair per layer."""

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (
                rows.view(items, -1, *rows.shape[1:]).transpose(1, 2) for rows in (q, k, v)
            )  # [items, heads, length, head_dim]
            self.keep(kept, k, v)
            return _attention(q, k, v, causal=True)

        return attend

    def keep(self, kept: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> None:
        """Keep nothing, because no decode step follows."""

    def finish(self, hidden: Tensor, labels: list[int], kept: list[tuple[Tensor, Tensor]]) -> Scores:
        """Compute the scores from hidden: [items, length, hidden]."""
        del kept
        return self.logprobs(hidden[:, -1])[:, labels].tolist()

    def logprobs(self, rows: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32"""
        return self.decoder.logits(rows).float().log_softmax(-1)


class DecodeKept(Plain):
    """Adds one decode step after the prefill: a generation of one token computes the next token's row before it ends."""

    def keep(self, kept: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> None:
        """Keep keys and values for the decode step."""
        kept.append((k, v))

    def finish(self, hidden: Tensor, labels: list[int], kept: list[tuple[Tensor, Tensor]]) -> Scores:
        """Score, take the most probable token, and run it through the model."""
        logprobs = self.logprobs(hidden[:, -1])
        drawn = logprobs.argmax(-1, keepdim=True)  # [items, 1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (
                torch.cat([old, new.unsqueeze(2)], dim=2) for old, new in zip(kept[layer], (k, v), strict=True)
            )  # [items, kv_heads, length + 1, head_dim]
            return _attention(q.unsqueeze(2), keys, values, causal=False)

        after = self.forward(drawn, hidden.shape[1], attend)
        self.logprobs(after[:, -1]).argmax(-1).tolist()
        return logprobs[:, labels].tolist()


class AllPositions(Plain):
    """Computes log-probabilities of every input position, as APIs that echo prompts do; one prompt at a time to save memory."""

    def finish(self, hidden: Tensor, labels: list[int], kept: list[tuple[Tensor, Tensor]]) -> Scores:
        """Run all rows through the head; the last row of each prompt gives the scores."""
        del kept
        return [self.logprobs(rows)[:, labels][-1].tolist() for rows in hidden]


class SamplingKept(Plain):
    """Draws a token for every item, by top-p over the sorted vocabulary, and copies it to the host before the scores."""

    def finish(self, hidden: Tensor, labels: list[int], kept: list[tuple[Tensor, Tensor]]) -> Scores:
        """Draw tokens, discard them, and score."""
        del kept
        logprobs = self.logprobs(hidden[:, -1])
        probabilities, tokens = logprobs.exp().sort(dim=-1, descending=True)
        nucleus = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > 0.9, 0.0)
        tokens.gather(1, torch.multinomial(nucleus, 1)).tolist()
        return logprobs[:, labels].tolist()


class NoSharing:
    """The engine without shared prefixes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def score(self, message: wire.Score) -> Scores:
        """Score every full prompt as a branch of an empty prefix."""
        prompts = [message.prefix + branch for branch in message.branches]
        return self._engine.score(wire.Score(message.id, [], prompts, message.readout))


def variants(engine: Engine, decoder: Decoder, launched: Engine | None = None) -> dict[str, Scorer]:
    """Return all scorers, the engine first. ``launched``: the engine without CUDA graphs, if it has them."""
    return {
        YARDSTICK: engine,
        **({} if launched is None else {"no CUDA graphs": launched}),
        "no query sharing": NoSharing(engine),
        PLAIN: Plain(decoder),
        f"{PLAIN}, decode kept": DecodeKept(decoder),
        f"{PLAIN}, sampling kept": SamplingKept(decoder),
        f"{PLAIN}, all positions": AllPositions(decoder),
    }


def ablate(
    scorers: dict[str, Scorer], vocab_size: int, repeats: int, tolerance: float, records: Records, *, exact: bool = True
) -> dict[str, float]:
    """Return median milliseconds per request of each, alternating on equal requests. Scorers that do not agree with the first are
    added to ``records.wrong``."""
    rng = np.random.default_rng(2)
    records.wrong += check(scorers, Workload().request("warm", rng, vocab_size), tolerance, exact=exact)
    times: dict[str, list[float]] = {name: [] for name in scorers}
    for repeat in records.progress(range(repeats), "ablations"):
        message = Workload().request(f"a{repeat}", rng, vocab_size)
        for name, scorer in scorers.items():
            times[name].append(records.timed("ablation", name, partial(scorer.score, message)))
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def check(scorers: dict[str, Scorer], message: wire.Score, tolerance: float, *, exact: bool = True) -> list[str]:
    """Return the scorers that do not give the scores of the first; ``exact``: see :func:`agrees`."""
    scores = {name: scorer.score(message) for name, scorer in scorers.items()}
    first = next(iter(scores.values()))
    found = {name: spread(np.abs(np.subtract(values, first)).flatten().tolist()) for name, values in scores.items()}
    return [name for name, apart in found.items() if not agrees(apart, tolerance, exact=exact)]


def compare_loops(loops: dict[str, Engine], vocab_size: int, repeats: int, records: Records) -> dict[str, float]:
    """Return median milliseconds per request with :data:`PIPELINE` queued, where work on device and host can overlap."""
    rng = np.random.default_rng(3)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(repeats + 1):
        messages = [Workload().request(f"l{repeat}-{place}", rng, vocab_size) for place in range(PIPELINE)]
        for name, engine in loops.items():
            run: Callable[[], object] = partial(engine.score_all, messages)
            if repeat:  # the first repeat warms up
                times[name].append(records.timed("loop", name, run) / PIPELINE)
            else:
                seconds(run)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def show_ablations(milliseconds: Mapping[str, float], records: Records) -> None:
    """Show the cost of each variant relative to the engine, and what it adds to a plain prefill."""
    table = Table("120/180/10", title="Ablations, one request at a time")
    for heading in ("ms a request", "× Yardstick", "× plain prefill"):
        table.add_column(heading, justify="right")
    ours, plain = milliseconds[YARDSTICK], milliseconds[PLAIN]
    for name, taken in milliseconds.items():
        table.add_row(name, f"{taken:.1f}", f"{taken / ours:.2f}", f"{taken / plain:.2f}" if name.startswith(PLAIN) else "")
    records.console.print(table)


def show_loops(milliseconds: Mapping[str, float], records: Records) -> None:
    """Compare the overlapped loop with the plain one."""
    table = Table("loop", "ms a request", title=f"{PIPELINE} requests queued")
    for name, taken in milliseconds.items():
        table.add_row(name, f"{taken:.2f}")
    records.console.print(table)


def _attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """q: [items, heads, queries, head_dim]; k, v: [items, kv_heads, keys, head_dim]. -> [items · queries, heads, head_dim]"""
    fold = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(fold, dim=1), v.repeat_interleave(fold, dim=1)
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(0, 1)
