"""The interface of a readout, and the results that readouts write.

A readout is one kind of output of a step: label log-probabilities, drawn tokens, and so on. The runner makes one object of each
kind for each step and calls it in this order:

1. :meth:`Readout.add` for each segment whose request is of the readout's kind: note the rows that are read;
2. :meth:`Readout.upload`, before the forward pass: add index arrays to the step's one copy to the device;
3. :meth:`Readout.queue`, behind the forward pass: queue the work, and add its results to the step's one copy to the host;
4. :meth:`Readout.read`, after that copy has arrived: write the results into the :class:`StepResult`. Steps are read in their
   order, so a result of several steps may be kept in :attr:`engine.requests.core.Branch.partial`.

Steps 1 to 3 never wait for the device. Readouts without an output are skipped after step 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.encoder import Model
from yardstick_llm.engine.models.modules import TokenHead
from yardstick_llm.engine.models.transfer import Download, Upload
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import Branch
from yardstick_llm.engine.runner.lenvm.draws import GuidedStep


class Drawn(msgspec.Struct, frozen=True, eq=False):
    """The next token of a sequence."""

    branch: Branch
    token: int | None
    """None: the sequence is complete without a draw, because ``max_tokens`` is 0."""
    logprobs: wire.Logprobs | None = None
    more: bool = False
    """Whether another token of this sequence follows, from the same step."""
    spoilt: bool = False
    """Whether the logits are not numbers, so that the token means nothing."""


class CheckedDraft(NamedTuple):
    """The draft of a sequence, after its draws."""

    branch: Branch
    drafted: int
    """Tokens of the draft."""
    accepted: int
    """Tokens at its beginning that were drawn."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of consecutive tokens of a prompt."""

    branch: Branch
    start: int
    """Position of the first of them in the prompt."""
    logprobs: list[wire.Logprobs]


@dataclass(slots=True)
class LenVMCounts:
    """Counts of the length model's work."""

    tokens: int = 0
    """Tokens that the length model computed, candidates included."""
    guided: int = 0
    """Draws that used the length model's values."""
    alone: int = 0
    """Draws of guided requests that were decided without the length model."""


@dataclass(slots=True)
class StepResult:
    """Results of a step. Guided draws come after the others; otherwise the order is that of the batch."""

    prompts: list[PromptPart] = field(default_factory=list)
    rows: list[tuple[Branch, list[float]]] = field(default_factory=list)
    """Rows of :class:`engine.wire.Scored`, of complete branches."""
    drawn: list[Drawn] = field(default_factory=list)
    drafts: list[CheckedDraft] = field(default_factory=list)
    lenvm: LenVMCounts = field(default_factory=LenVMCounts)


@dataclass(frozen=True, slots=True)
class ReadoutContext:
    """The runner's model and constants that readouts use."""

    decoder: Model
    eos_token_ids: tuple[int, ...]
    class_logits: Callable[[Tensor, Sequence[Branch]], list[Tensor]]
    """(hidden [rows, hidden], their branches) -> logits [rows, classes] float32 of consecutive rows with the same head"""
    token_heads: Callable[[Sequence[Branch]], list[tuple[TokenHead, slice]]]
    """(branch of each row) -> the language-model head of consecutive rows; a single one where no adapter has its own"""
    spellings: Sequence[bytes] = ()
    """UTF-8 bytes of each token, none for control tokens; empty where the tokeniser does not give them."""

    def by_head(self, branches: Sequence[Branch], compute: Callable[[TokenHead, slice], Tensor]) -> Tensor:
        """Results of ``compute`` for consecutive rows with the same head, one behind the other. ``branches``: of each row."""
        parts = [compute(head, rows) for head, rows in self.token_heads(branches)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class StepTensors:
    """Device tensors of one step that readouts read."""

    hidden: dict[Readout, Tensor] = field(default_factory=dict)
    """[rows, hidden], after the final norm, for each readout: its :attr:`Readout.hidden_rows`."""
    logits: dict[Readout, Tensor] = field(default_factory=dict)
    """[rows, vocab] float32 for each readout with :attr:`Readout.logit_rows`."""
    guided: GuidedStep | None = None
    """None where the step has no work for the length model."""


class Readout(ABC):
    """One kind of output of one step."""

    kind: ClassVar[type[msgspec.Struct]]
    """:attr:`engine.requests.core.Request.kind` of the requests that may have this output."""

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        self.context = context
        self.batch = batch
        self.branches: list[Branch] = []
        """Branches whose last token this step computes, and whose result this readout brings."""
        self.ended: list[Branch] = []
        """Branches that this step completes without a result."""
        self.hidden_rows: list[int] = []
        """Rows of the step whose hidden states :meth:`queue` reads."""
        self.logit_rows: list[int] = []
        """Rows of the step whose logits over the vocabulary :meth:`queue` reads."""
        self.tokens: Tensor | None = None
        """[branches] int64, on the device: tokens that were drawn. None for a readout that draws nothing."""

    @property
    def empty(self) -> bool:
        """Whether the step has no such output."""
        return not (self.branches or self.ended)

    @abstractmethod
    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:
        """Note what ``segment`` asks for.

        row: place of its first token among the step's tokens on its model; index: its place among the segments on its model. Reads
        the branch as it is now, because the next schedule changes it.
        """

    def upload(self, upload: Upload) -> None:  # noqa: B027 (optional)
        """Add host arrays to the copy to the device."""

    @abstractmethod
    def queue(self, step: StepTensors, download: Download) -> None:
        """Queue the work on the device, and its results for the copy to the host."""

    @abstractmethod
    def read(self, result: StepResult) -> None:
        """Write the results, which are on the host now."""
