"""How long texts get at each scale: written by the demo models, as a table and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
from rich.table import Table

from benchmarks.engine.records import Records
from benchmarks.engine.writers import CANDIDATES, Writer
from engine import wire
from engine.demo import MODELS
from examples.demo_models.corpus.documents import draw_request
from examples.demo_models.text import load_tokenizer

SCALES = (-40.0, -10.0, -2.0, 0.0, 2.0, 10.0, 40.0)
LIMIT = 400
"""Tokens at which a text is given up."""


@dataclass(frozen=True)
class Lengths:
    """Of texts that were written alike."""

    tokens: Sequence[int]
    """Of each text, the ending one not counted."""
    ended: float
    """Share that ended by themselves."""

    @property
    def mean(self) -> float:
        """Tokens."""
        return statistics.mean(self.tokens)


def demo_prompts(count: int) -> list[list[int]]:
    """Requests for descriptions of products that training never saw."""
    rng, tokenizer = Random(5), load_tokenizer(MODELS / "base")
    return [tokenizer.encode(draw_request(rng, held_out=True)[0]).ids for _ in range(count)]


def lengths_at(
    writer: Writer, prompts: Sequence[Sequence[int]], guidance: wire.LengthGuidance | None, sampling: wire.Sampling
) -> Lengths:
    """One text a prompt; the seeds are the prompts' numbers, so the same at every guidance."""
    requests = [
        wire.Generate(
            f"{guidance}-{place}",
            [*prompt],
            msgspec.structs.replace(sampling, max_tokens=LIMIT, seed=place),
            length_guidance=guidance,
        )
        for place, prompt in enumerate(prompts)
    ]
    texts = writer.write(requests).values()
    stopped = [deltas[-1].finish == "stop" for deltas in texts]
    tokens = [sum(len(delta.tokens) for delta in deltas) - end for deltas, end in zip(texts, stopped, strict=True)]
    return Lengths(tokens, sum(stopped) / len(stopped))


def by_scale(writer: Writer, texts: int, records: Records) -> dict[float, Lengths]:
    """``centered_exp`` at each of :data:`SCALES`."""
    prompts = demo_prompts(texts)
    found = {}
    for place in records.progress(range(len(SCALES)), "lengths by scale"):
        scale = SCALES[place]
        found[scale] = lengths_at(writer, prompts, wire.LengthGuidance(scale=scale), wire.Sampling(top_k=CANDIDATES))
        records.rows += [{"kind": "length", "scale": scale, "tokens": tokens} for tokens in found[scale].tokens]
    return found


def show(found: Mapping[float, Lengths], records: Records) -> None:
    """A row for each statistic."""
    table = Table("centered_exp, scale", *(f"{scale:g}" for scale in found), title=f"Demo models, {CANDIDATES} candidates")
    table.add_row("mean tokens", *(f"{lengths.mean:.1f}" for lengths in found.values()))
    table.add_row("median", *(f"{statistics.median(lengths.tokens):.0f}" for lengths in found.values()))
    table.add_row(f"ended within {LIMIT}", *(f"{lengths.ended:.0%}" for lengths in found.values()))
    records.console.print(table)


def plot(folder: Path, found: Mapping[float, Lengths]) -> None:
    """``lengths.png`` and ``lengths.svg``: the share of texts up to each length, a line a scale."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, (scale, lengths) in enumerate(found.items()):
        axes.ecdf(lengths.tokens, label=f"{scale:g}", color=colormaps["coolwarm"](place / max(1, len(found) - 1)))
    axes.set(
        xlabel="tokens", ylabel="share of texts", xlim=(0, LIMIT), title="Lengths of texts by scale (centered_exp, demo models)"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(title="scale", loc="lower right")
    for kind in ("png", "svg"):
        figure.savefig(folder / f"lengths.{kind}", dpi=150, metadata={"Date": None} if kind == "svg" else None)
