"""The engine's nouns: requests, their branches, and the batch of runs that one step computes.

A request is one prefix and its branches. Tokens of the prefix live in the prefix cache, where every request may share them;
tokens of a branch live in slots of its own. Scoring gives each item a branch; a generation gives each of its ``n`` sequences
one, which starts with the prompt's last token and grows by what is drawn. So at any moment all that is left to do for a
request is to compute the tokens that have no slot yet, and a preempted branch is simply one that lost its slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine import wire

if TYPE_CHECKING:
    from engine.memory.prefix_cache import Node

Ints = npt.NDArray[np.int32]
"""Token ids or slot numbers, one dimension."""

EMPTY: Ints = np.empty(0, np.int32)

PENDING = -1
"""Stands for a token that a step in flight is drawing: the next step takes it from device memory."""


class IntBuffer:
    """A growing run of int32."""

    __slots__ = ("_data", "_size")

    def __init__(self, values: Sequence[int] | Ints = ()) -> None:
        self._data: Ints = np.array(values, np.int32)
        self._size = len(self._data)

    def __len__(self) -> int:
        return self._size

    def extend(self, values: Sequence[int] | Ints) -> None:
        """Append ``values``, in amortised constant time for each."""
        end = self._size + len(values)
        if end > len(self._data):
            grown = np.empty(max(end, 2 * len(self._data)), np.int32)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : end] = values
        self._size = end

    def clear(self) -> None:
        """Forget all values."""
        self._data = EMPTY
        self._size = 0

    @property
    def view(self) -> Ints:
        """The values, not copied: valid until the next change."""
        return self._data[: self._size]


@dataclass(eq=False, slots=True)
class Branch:
    """New tokens on top of a request's prefix."""

    request: Request
    index: int
    tokens: IntBuffer
    slots: IntBuffer = field(default_factory=IntBuffer)
    """Of the tokens computed so far; this branch owns them."""
    given: int = 0
    """Tokens that came with the request; those behind them are output."""
    prompt_logprobs: list[wire.Logprobs] = field(default_factory=list)
    """Of the prompt's tokens so far, while it is computed in chunks."""
    flights: int = 0
    """Steps in flight that compute its last token; the result comes when they are settled."""
    done: bool = False

    def __post_init__(self) -> None:
        self.given = len(self.tokens)

    @property
    def pending(self) -> bool:
        """Whether its newest token is being drawn by a step in flight."""
        return len(self.tokens) > 0 and int(self.tokens.view[-1]) == PENDING

    def draw(self, token: int) -> None:
        """Take the token that a settled step has drawn."""
        if self.pending:
            self.tokens.view[-1] = token
        else:
            self.tokens.extend([token])

    @property
    def remaining(self) -> int:
        """Tokens without a slot."""
        return len(self.tokens) - len(self.slots)

    @property
    def outputs(self) -> Ints:
        """Tokens drawn so far, in this attempt."""
        return self.tokens.view[self.given :]


_arrivals = itertools.count()


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prefix and its branches, and how far they are."""

    id: str
    prefix: Ints
    branches: list[Branch] = field(default_factory=list)
    """Not finished yet, in order."""
    priority: int = 0
    expires: float | None = None
    """On the monotonic clock."""
    arrival: int = field(default_factory=lambda: next(_arrivals))
    node: Node | None = None
    """How far into the prefix cache the prefix is held; None while the request waits."""
    prefix_slots: IntBuffer = field(default_factory=IntBuffer)
    cached_tokens: int = 0
    computed_tokens: int = 0
    begun: bool = False

    @property
    def prefix_remaining(self) -> int:
        """Prefix tokens without a slot."""
        return len(self.prefix) - len(self.prefix_slots)

    def may_run_ahead(self, branch: Branch) -> bool:  # noqa: ARG002
        """Whether the step after the one that draws the next token of ``branch`` may begin before that token is known."""
        return False

    @property
    def reserve(self) -> int:
        """Tokens that the next step must have room for on this request's account, whatever else is in it."""
        return 0

    @property
    def droppable(self) -> bool:
        """Whether ending it once its deadline has passed saves work and takes nothing from its caller."""
        return not self.begun


@dataclass(eq=False, slots=True, kw_only=True)
class ScoreRequest(Request):
    """Label log-probabilities at the end of each branch."""

    labels: list[int]
    results: list[list[float]]
    """[branch][label]; empty until that branch is done."""

    @classmethod
    def of(cls, message: wire.Score, now: float) -> ScoreRequest:
        """``now``: the monotonic clock, seconds."""
        request = cls(
            id=message.id,
            prefix=np.array(message.prefix, np.int32),
            priority=message.priority,
            expires=None if message.deadline is None else now + message.deadline,
            labels=message.labels,
            results=[[] for _ in message.branches],
        )
        request.branches = [Branch(request, i, IntBuffer(tokens)) for i, tokens in enumerate(message.branches)]
        return request

    @property
    def droppable(self) -> bool:
        return any(branch.remaining for branch in self.branches)


@dataclass(eq=False, slots=True, kw_only=True)
class GenerateRequest(Request):
    """``n`` continuations of one prompt."""

    message: wire.Generate
    prompt: Ints

    @classmethod
    def of(cls, message: wire.Generate, now: float) -> GenerateRequest:
        """A prompt whose own log-probabilities are asked for is computed by its first branch, the others share a prefix."""
        prompt = np.array(message.prompt, np.int32)
        whole = message.prompt_logprobs is not None
        request = cls(
            id=message.id,
            prefix=EMPTY if whole else prompt[:-1],
            priority=message.priority,
            expires=None if message.deadline is None else now + message.deadline,
            message=message,
            prompt=prompt,
        )
        start = prompt if whole else prompt[-1:]
        request.branches = [Branch(request, i, IntBuffer(start)) for i in range(message.sampling.n)]
        return request

    @property
    def reserve(self) -> int:
        return 0 if self.prefix_remaining else len(self.branches)

    @property
    def penalised(self) -> bool:
        """Whether a draw depends on the tokens drawn before it other than through the model."""
        sampling = self.message.sampling
        return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)

    def may_run_ahead(self, branch: Branch) -> bool:
        return not self.penalised and self.offset(branch) + 1 < self.message.sampling.max_tokens

    def offset(self, branch: Branch) -> int:
        """Output tokens of ``branch`` so far, those of an earlier attempt included."""
        return self.message.resume_offset + len(branch.outputs)

    def output(self, branch: Branch) -> Ints:
        """Those tokens."""
        earlier = self.prompt[len(self.prompt) - self.message.resume_offset :]
        return np.concatenate([earlier, branch.outputs])


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive new tokens of one prefix or branch in one step.

    Each token attends to the ``context`` slots up to and including its own, so a run may sit on slots that another run of the
    same step fills: within a layer all keys and values are written before attention reads them.
    """

    request: Request
    branch: Branch | None
    """None for a part of the prefix."""
    tokens: Ints
    context: Ints
    """Slots of the whole context in order of position; the last ``len(tokens)`` are this run's own."""

    @property
    def completes(self) -> bool:
        """Whether this run computes its branch's last token, whose hidden row is what the request is after."""
        return self.branch is not None and self.branch.remaining == 0


@dataclass(slots=True)
class Batch:
    """What one step computes: scoring and decoding together."""

    runs: list[Run] = field(default_factory=list)
    tokens: int = 0

    def add(self, run: Run) -> None:
        """Runs are computed in the order they are added."""
        self.runs.append(run)
        self.tokens += len(run.tokens)


def as_ints(parts: Iterable[Ints]) -> Ints:
    """Concatenate, also nothing."""
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else EMPTY
