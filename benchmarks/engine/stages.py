"""Measures the time of a guided step by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.engine.engines import Stopwatch
from engine.lenvm import guided_draws
from engine.loop import Loop

REST = "host, copies and the rest"


class Stages:
    """Stopwatches by stage, while :meth:`timed` is open."""

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._watches: dict[str, Stopwatch] = {}

    @contextmanager
    def timed(self, loop: Loop) -> Iterator[None]:
        """Measure every stage of ``loop``."""
        runner: Any = loop._runner
        steering: Any = runner._lenvm
        places: list[tuple[Any, str, str]] = [
            (runner._decoder, "forward", "base model"),
            *((graphs, "forward", "base model") for graphs in runner._graphs),
            (runner, "_logits", "base model's head"),
            (guided_draws, "candidates", "candidates"),
            (guided_draws, "needs_value", "candidates"),
            (steering._model, "forward", "length model"),
            *([] if steering._graphs is None else [(steering._graphs, "forward", "length model")]),
            (steering._model.head, "forward", "length model's head"),
            (guided_draws, "length_tilt", "tilt"),
            (guided_draws, "seeded_choice", "draw"),
            (steering, "_adopt", "adoption"),
        ]
        before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
        for owner, name, stage in places:
            watch = self._watches.setdefault(stage, Stopwatch(gpu=self._gpu))
            setattr(owner, name, watch.around(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, own in before:
                delattr(owner, name) if own is None else setattr(owner, name, own)

    def shares(self, wall: float) -> dict[str, float]:
        """Return the seconds per stage, out of ``wall``, since the last call."""
        taken = {stage: watch.take() for stage, watch in self._watches.items()}
        return taken | {REST: wall - sum(taken.values())}
