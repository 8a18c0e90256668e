"""``python -m tests.engine.shared_graphs RUN``: a loop whose model is in two processes, which capture steps by a stand-in.

It prints one line of JSON, an :class:`Outcome`, and then generates until it is killed. Each process has a file in the folder of its
:class:`Run`, named by its rank: the first line is its process id, and the others are the steps that its graphs were asked for.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.recording import Recorder
from tests.interpreter import speed_up
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner import capturing
from yardstick_llm.engine.runner.distributed import worker
from yardstick_llm.engine.runner.distributed.group import Assignment
from yardstick_llm.engine.runner.graphs import Captured, StepGraphs
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import attention_layout

PROMPT, OTHER = list(range(3, 30)), list(range(60, 95))
MESSAGES: list[wire.Request] = [
    wire.Score("labels", PROMPT[:17], [[7, 8], [9], [10, 11, 12]], wire.Labels([1, 2])),
    wire.Score("likelihoods", PROMPT[:9], [[7, 8], list(range(40, 53))], wire.Likelihood()),
    wire.Generate("greedy", OTHER, wire.Sampling(max_tokens=5, temperature=0, ignore_eos=True, n=2), logprobs=3),
    wire.Generate("drawn", [5, 7], wire.Sampling(max_tokens=4, seed=3, ignore_eos=True, n=3)),
    wire.Generate("echo", PROMPT, wire.Sampling(max_tokens=2, temperature=0), prompt_logprobs=1),
]
"""The first step of "greedy" has more tokens than any graph."""
ENDLESS = wire.Generate("endless", [5, 6], wire.Sampling(max_tokens=200, ignore_eos=True))


class Run(msgspec.Struct):
    """Settings of both processes, and the capture that fails."""

    settings: EngineSettings
    folder: str
    failing: tuple[int, int] | None = None
    """A rank, and the number of its capture that fails, from 1 up."""


class Outcome(msgspec.Struct):
    """Results of rank 0."""

    answers: list[dict[str, list[float]]] = []
    """Of two rounds, as :func:`answers` returns them. The second round reads cached keys and values."""
    steps: int = 0
    replayed: int = 0
    problem: str = ""
    """Why the loop was not built."""


def answers(loop: Loop) -> dict[str, list[float]]:
    """Return all numbers of the replies to each of :data:`MESSAGES`, one message after another."""
    found = dict[str, list[float]]()
    for message in MESSAGES:
        loop.submit(message)
        while not loop.idle:
            for reply in loop.step():
                assert isinstance(reply, wire.Scored | wire.Delta), reply
                found.setdefault(reply.id, []).extend(numbers(reply))
    return found


def numbers(reply: wire.Scored | wire.Delta) -> list[float]:
    if isinstance(reply, wire.Scored):
        return [value for row in reply.rows for value in row]
    logprobs = [part for part in (reply.logprobs, reply.prompt_logprobs) if part is not None]
    return [reply.index, *reply.tokens, *(value for part in logprobs for value in part.chosen if value is not None)]


def prepare(run: Run, rank: int) -> pytest.MonkeyPatch:
    """Let this process capture steps without a GPU, and write to its file."""
    patch, captures = pytest.MonkeyPatch(), itertools.count(1)

    class FailingRecorder(Recorder):
        def __call__(self, work: Callable[[], torch.Tensor]) -> Captured:
            captured = super().__call__(work)
            if (rank, next(captures)) == run.failing:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return captured

    patch.setattr(capturing, "_graphs_problem", lambda decoder: None)
    patch.setattr(capturing, "CudaCapture", lambda device: FailingRecorder(patch))
    patch.setattr(capturing, "BUCKETS", (4, 16))
    patch.setattr(capturing, "LARGE_BUCKETS", (30,))
    patch.setattr(attention_layout, "PROGRAMS", 8)  # less padding for the interpreter
    file = (Path(run.folder) / str(rank)).open("w", buffering=1)
    file.write(f"{os.getpid()}\n")
    forward = StepGraphs.forward

    def noted(graphs: StepGraphs, tokens: torch.Tensor, *others: Any) -> torch.Tensor | None:
        found = forward(graphs, tokens, *others)
        file.write(f"{len(tokens)} tokens, graphs above {graphs._above}: {'launched' if found is None else 'replayed'}\n")
        return found

    patch.setattr(StepGraphs, "forward", noted)
    return patch


def lead(run: Run) -> None:
    """Be rank 0."""
    command = [sys.executable, "-m", __spec__.name, msgspec.json.encode(run).decode()]
    patch = prepare(run, 0)
    patch.setattr(Assignment, "command", property(lambda assignment: [*command, msgspec.json.encode(assignment).decode()]))
    try:
        loop = build_loop(run.settings)
    except ModelError as error:
        print(msgspec.json.encode(Outcome(problem=str(error))).decode(), flush=True)
        return
    found = [answers(loop) for _ in range(2)]
    outcome = Outcome(found, loop.stats.steps, loop.stats.replayed_steps)
    print(msgspec.json.encode(outcome).decode(), flush=True)
    while True:
        loop.submit(ENDLESS)
        while not loop.idle:
            loop.step()


def main(run_json: str, *assignment: str) -> None:
    """``assignment``: that of a worker; none of rank 0."""
    logging.basicConfig(level=logging.INFO)
    run = msgspec.json.decode(run_json, type=Run)
    if assignment:
        prepare(run, msgspec.json.decode(*assignment, type=Assignment).rank)
        worker.main(*assignment)
    else:
        lead(run)


if __name__ == "__main__":
    speed_up()
    main(*sys.argv[1:])
