"""Measures the gain of each part of the guided step: straightforward variants replace the engine's own code.

All variants draw from the same distributions as the engine. Separate forward passes for pending tokens and for candidates,
recomputation of drawn candidates, and tilts on the host are the methods of the published server.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.engine.records import Records
from benchmarks.engine.writers import Writer, Writing
from engine.batch import ExtendSegment
from engine.device.sampling import gumbel
from engine.lenvm.guided_draws import GuidedDraws, GuidedStep, LenVMRunner, Resolve
from engine.lenvm.guided_rows import GUIDANCE, GuidedRows
from engine.lenvm.lenvm_pass import LenVMOutput, LenVMPass, PassAttention
from engine.loop import Loop

YARDSTICK = "Yardstick"


class SeparateExtend(LenVMRunner):
    """Computes pending tokens in a separate forward pass, before that of the candidates."""

    def _forward(self, work: LenVMPass, resolve: Resolve) -> LenVMOutput:
        if not work.segments or not work.passes:
            return super()._forward(work, resolve)
        alone = work._replace(passes=[], branches=[], tokens=work.tokens[:0], counts=work.counts[:0])
        first = super()._forward(alone, resolve)
        second = super()._forward(work._replace(segments=[], valued=[]), resolve)
        return second._replace(ends=first.ends)


class NoAdoption(LenVMRunner):
    """Runs the last drawn token through the length model again, as if its keys and values had been discarded."""

    def _forward(self, work: LenVMPass, resolve: Resolve) -> LenVMOutput:
        again = [
            ExtendSegment(
                candidate_pass.branch.request,
                candidate_pass.branch,
                candidate_pass.branch.tokens.view[-1:].copy(),
                candidate_pass.prefix,
            )
            for candidate_pass in work.passes
            if candidate_pass.pending is None
        ]
        return super()._forward(work._replace(segments=[*work.segments, *again]), resolve)


class EachReadsItsPrefix(LenVMRunner):
    """Every candidate reads the keys and values of its text separately, in launched passes, because no such pass is captured."""

    def _forward(self, work: LenVMPass, resolve: Resolve) -> LenVMOutput:
        self._graphs = None
        return super()._forward(work, resolve)

    def _attend(self, work: LenVMPass) -> PassAttention:
        alone = [candidate_pass for candidate_pass, count in zip(work.passes, work.branches, strict=True) for _ in range(count)]
        return super()._attend(work._replace(passes=alone, branches=[1] * len(alone), counts=torch.ones_like(work.tokens)))


class OnTheHost(LenVMRunner):
    """Copies candidates to the host, computes the formula row by row there, and copies the choice back. ``centered_exp`` only."""

    def draw_guided(
        self, logits: Tensor, rows: GuidedRows, segments: Sequence[ExtendSegment], valued: Sequence[int], resolve: Resolve
    ) -> GuidedStep:
        sampling, _, found = self._candidates(logits, rows)
        width = found.ids.shape[1]
        counts = found.counts.tolist()
        at = [row for row, count in enumerate(counts) if count > 1]
        passes = [rows.passes[row] for row in at]
        branches = [counts[row] for row in at] if self._compact else [width] * len(at)
        places = [row * width + rank for row, count in zip(at, branches, strict=True) for rank in range(count)]
        tokens = found.ids.flatten()[torch.tensor(places, dtype=torch.int64, device=self._device)]
        pending = [candidate_pass.pending for candidate_pass in passes if candidate_pass.pending is not None]
        passed = self._forward(LenVMPass([*segments, *pending], valued, passes, branches, tokens, found.counts[at]), resolve)
        z = dict(zip(places, [] if passed.branches is None else passed.branches.tolist(), strict=True))
        noise, ids, p = (tensor.tolist() for tensor in (gumbel(sampling.keys, found.ids), found.ids, found.probabilities))
        chosen, scales = [], np.frombuffer(b"".join(rows.packed), GUIDANCE)["scale"].tolist()
        for row, count in enumerate(counts):
            tilted = [
                p[row][rank] * math.exp(scales[row] * self._value(ids[row][rank], z.get(row * width + rank)))
                for rank in range(count)
            ]
            keys = [math.log(weight) + noise[row][rank] for rank, weight in enumerate(tilted)]
            chosen.append(max(range(count), key=keys.__getitem__))
        ranks = torch.tensor(chosen, device=self._device)
        firsts = np.cumsum([0, *branches])
        drawn, slots = [firsts[i] + chosen[row] for i, row in enumerate(at)], [candidate_pass.slot for candidate_pass in passes]
        self._adopt(passed, *(torch.tensor(values, dtype=torch.int64, device=self._device) for values in (drawn, slots)))
        undecided = found.counts > 1
        steered = GuidedDraws(
            tokens=found.ids.gather(1, ranks.unsqueeze(1)).squeeze(1),
            ids=found.ids,
            chosen=ranks.unsqueeze(1),
            probabilities=found.probabilities,
            raw=torch.zeros_like(found.probabilities),
            ends=torch.zeros_like(found.probabilities, dtype=torch.bool),
            undecided=undecided,
            counts=found.counts,
        )
        kept = set(at)
        skipped = [each for row, each in enumerate(rows.passes) if row not in kept]
        return GuidedStep(steered, passed.ends, skipped, self._needs)

    def _value(self, token: int, z: float | None) -> float:
        return 0.0 if z is None or token in self._eos else 1 / (1 + math.exp(-z))


VARIANTS: dict[str, type[LenVMRunner]] = {
    YARDSTICK: LenVMRunner,
    "separate extend": SeparateExtend,
    "no adoption": NoAdoption,
    "keys and values read per candidate": EachReadsItsPrefix,
    "guidance on the host": OnTheHost,
}


@contextmanager
def guided_by(loop: Loop, kind: type[LenVMRunner]) -> Iterator[None]:
    """Give ``loop``, which is idle, another guidance runner."""
    runner: Any = loop._runner
    own = runner._lenvm
    runner._lenvm = kind.__new__(kind)
    runner._lenvm.__dict__.update(own.__dict__)
    try:
        yield
    finally:
        runner._lenvm = own


def ablate(
    writer: Writer, launched: Writer | None, writings: Mapping[str, Writing], repeats: int, records: Records
) -> dict[str, dict[str, float]]:
    """Median milliseconds a step of each variant, taken in turn, for each load; ``launched``: the engine without CUDA graphs, where
    it has them."""
    variants = {name: (writer, kind) for name, kind in VARIANTS.items()}
    variants |= {} if launched is None else {"no CUDA graphs": (launched, LenVMRunner)}
    rng = np.random.default_rng(4)
    found: dict[str, dict[str, float]] = {}
    for load, writing in writings.items():
        times: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in records.progress(range(repeats + 1), f"ablations, {load}"):
            for name, (writes, kind) in variants.items():
                with guided_by(writes.loop, kind):
                    seconds = writes.step_seconds(writing.requests(rng, writes.vocab_size, [True] * writing.rows))
                if repeat:  # the first repeat warms up
                    times[name].append(seconds)
                    records.rows.append({"kind": "guided ablation", "load": load, "name": name, "seconds": seconds})
        found[load] = {name: 1000 * statistics.median(values) for name, values in times.items()}
    return found


def show(found: Mapping[str, Mapping[str, float]], records: Records) -> None:
    """Show one column per load."""
    table = Table("ms a step (× Yardstick)", *found, title="Ablations of guidance")
    for name in next(iter(found.values())):
        table.add_row(name, *(f"{load[name]:.2f} ({load[name] / load[YARDSTICK]:.2f})" for load in found.values()))
    records.console.print(table)
