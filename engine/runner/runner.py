"""One step on the device: the batch's tokens through the model, and the outputs that its requests ask for.

:meth:`Runner.launch` queues the work and returns. :meth:`PendingStep.wait` blocks until the results are on the host. Nothing
between the two waits for the device. On a CPU the work is done when ``launch`` returns, and ``wait`` only unpacks it.

The kinds of output are in :mod:`engine.runner.readouts`. The length model's part of a step, :mod:`engine.runner.lenvm.draws`, is
queued behind the main model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.encoder import Model
from yardstick_llm.engine.models.lora.linear import StepRows, UploadedRows
from yardstick_llm.engine.models.lora.slots import DeviceSlots
from yardstick_llm.engine.models.modules import TokenHead
from yardstick_llm.engine.models.transfer import Copy, Download, Upload
from yardstick_llm.engine.requests.batch import Batch, CandidatePass, ExtendSegment, Tokens
from yardstick_llm.engine.requests.core import PENDING, Branch
from yardstick_llm.engine.runner.attention.base import AttentionBackend
from yardstick_llm.engine.runner.attention.whole import WholeAttention
from yardstick_llm.engine.runner.graphs import StepGraphs
from yardstick_llm.engine.runner.images import StepImages
from yardstick_llm.engine.runner.lenvm.draws import GuidedStep, LenVMRunner
from yardstick_llm.engine.runner.machine import StepThreads
from yardstick_llm.engine.runner.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from yardstick_llm.engine.runner.readouts.draws import DrawReadout, GuidedDrawReadout, PromptLogprobsReadout
from yardstick_llm.engine.runner.readouts.scores import (
    ClassReadout,
    EmbeddingReadout,
    LabelLogitsReadout,
    LabelReadout,
    LengthValueReadout,
    LikelihoodReadout,
    SparseReadout,
    TokenVectorReadout,
)
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.lora_layout import LoraRun, block_runs

KINDS: tuple[type[Readout], ...] = (
    LabelReadout,
    LabelLogitsReadout,
    LikelihoodReadout,
    ClassReadout,
    EmbeddingReadout,
    TokenVectorReadout,
    SparseReadout,
    DrawReadout,
    PromptLogprobsReadout,
)
"""Outputs of the main model, in the order in which their work is queued."""


class OutputPlan:
    """The outputs of one batch."""

    def __init__(self, batch: Batch, context: ReadoutContext) -> None:
        """Reads ``batch`` as it is now; branches change when the next step is scheduled."""
        asked = {segment.request.kind for segment in batch.segments}
        main = [kind(context, batch) for kind in KINDS if kind.kind in asked]
        self.guided = GuidedDrawReadout(context, batch)
        self.length_values = LengthValueReadout(context, batch)
        by_kind: dict[type[msgspec.Struct] | None, list[Readout]] = {}
        guided = (self.guided,) if batch.candidate_passes else ()
        for readout in (*main, *guided, self.length_values):
            by_kind.setdefault(readout.kind, []).append(readout)
        for segments in (batch.segments, batch.lenvm_segments):
            row = 0
            for index, segment in enumerate(segments):
                if (branch := segment.branch) is not None:
                    for readout in by_kind.get(segment.request.kind, ()):
                        readout.add(segment, branch, row, index)
                row += segment.tokens.size
        self.main: list[Readout] = [readout for readout in main if not readout.empty]
        """Readouts of the main model that have an output."""
        self.lenvm: list[Readout] = [readout for readout in (self.guided, self.length_values) if not readout.empty]
        """Readouts of the length model that have an output."""
        self.readouts = [*self.main, *self.lenvm]
        """All that have an output."""
        self.branches = list(dict.fromkeys(branch for readout in self.readouts for branch in (*readout.branches, *readout.ended)))
        """Branches whose result this step brings."""

    @property
    def skipped(self) -> list[CandidatePass]:
        """Candidate passes that the length model did not compute. Known once the step is launched."""
        return self.guided.skipped


class StepAdapters:
    """Prepares the decoder's projections for each step. It does no work in steps without adapters."""

    def __init__(self, decoder: Model, slots: DeviceSlots | None = None, rows: StepRows | None = None) -> None:
        """``slots``: None in an engine without adapters. ``rows``: those that the decoder's projections read."""
        self._decoder = decoder
        self._slots = slots
        self._rows = rows or StepRows()
        self._slot_of: dict[str, int] = {}

    @property
    def active(self) -> bool:
        """Whether the step has a request with an adapter."""
        return self._rows.tokens > 0

    @property
    def embeds(self) -> bool:
        """Whether the step has an adapter with an embedding of its own, which no CUDA graph has."""
        return bool(self._rows.embeddings)

    def begin(self, batch: Batch) -> None:
        """Put the segments in order of their adapters, those without one first, and copy adapters that have no slot."""
        self._rows.tokens, self._rows.embeddings = 0, ()
        if self._slots is None:
            return
        adapters = dict.fromkeys(segment.request.adapter for segment in batch.segments)
        named = [adapter for adapter in adapters if adapter is not None]
        if named:
            self._slot_of = self._slots.place(named)
            batch.segments.sort(key=self._slot)  # stable: segments of a branch keep their order
            self._rows.tokens = batch.tokens

    def upload(self, batch: Batch, read: Sequence[int], upload: Upload) -> None:
        """Set the runs of rows of each adapter. ``read``: rows of the step that readouts read."""
        if not self.active:
            return
        lengths = [segment.tokens.size for segment in batch.segments]
        slots = np.repeat([self._slot(segment) for segment in batch.segments], lengths)
        assert len(slots) == batch.tokens
        own = slots[np.asarray(read or [0], np.int64)]  # one row is computed where none is read
        order = np.argsort(own, kind="stable")
        self._rows.all = _uploaded(slots, upload)
        self._rows.embeddings = tuple(self._embeddings(self._rows.all.runs))
        self._rows.read = _uploaded(own[order], upload, upload.add(order))

    def _embeddings(self, runs: Sequence[LoraRun]) -> Iterator[tuple[int, int, Tensor]]:
        assert self._slots is not None
        own = self._slots.modules["embed_tokens"]
        weights = {slot: own[digest] for digest, slot in self._slot_of.items() if digest in own}
        for run in runs:
            if run.slot in weights:
                yield run.begin, run.end, weights[run.slot]

    def class_logits(self, hidden: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
        """See :class:`engine.runner.readouts.base.ReadoutContext`."""
        parts, begin = [], 0
        for digest, group in groupby(branches, key=_own_head):
            end = begin + len(list(group))
            rows = hidden[begin:end]
            if digest is None:
                parts.append(self._decoder.class_logits(rows))
            else:
                assert self._slots is not None
                parts.append(linear(rows.float(), self._slots.heads[digest]))
            begin = end
        return parts

    def token_heads(self, branches: Sequence[Branch]) -> list[tuple[TokenHead, slice]]:
        """See :class:`engine.runner.readouts.base.ReadoutContext`."""
        assert isinstance(self._decoder, Decoder)
        own = {} if self._slots is None else self._slots.modules["lm_head"]
        if not own or not branches:
            return [(self._decoder.token_head, slice(0, len(branches)))]
        found, begin = [], 0
        for digest, group in groupby(branches, key=_own_token_head):
            end = begin + len(list(group))
            head = self._decoder.token_head if digest is None else self._decoder.token_head_of(own[digest])
            found.append((head, slice(begin, end)))
            begin = end
        return found

    def _slot(self, segment: ExtendSegment) -> int:
        adapter = segment.request.adapter
        return -1 if adapter is None else self._slot_of[adapter.digest]


def _own_head(branch: Branch) -> str | None:
    """Digest of the adapter whose head reads ``branch``; None: the base model's head does."""
    adapter = branch.request.adapter
    return None if adapter is None or adapter.head is None else adapter.digest


def _own_token_head(branch: Branch) -> str | None:
    """Digest of the adapter whose language-model head reads ``branch``; None: the base model's head does."""
    adapter = branch.request.adapter
    return None if adapter is None or "lm_head" not in adapter.modules else adapter.digest


def _uploaded(slots: npt.NDArray[np.int64], upload: Upload, order: Copy | None = None) -> UploadedRows:
    """``slots``: of each row, in order."""
    runs = _runs(slots)
    blocks, size = block_runs(runs, len(slots))
    return UploadedRows(runs, upload.add(blocks), size, order)


def _runs(slots: npt.NDArray[np.int64]) -> tuple[LoraRun, ...]:
    """Runs of equal ``slots``, which are in order; -1 has none."""
    begins = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
    ends = [*begins[1:], len(slots)] if begins else []
    return tuple(LoraRun(int(slots[begin]), begin, end) for begin, end in zip(begins, ends, strict=True))


class DeviceLost(Exception):
    """The device computes nothing more, as a GPU after an illegal access to memory. The engine has to start again.

    No RuntimeError, because those end the step's requests only.
    """


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched and whose results are not on the host yet."""

    batch: Batch
    plan: OutputPlan
    download: Download

    def wait(self) -> StepResult:
        """Block until the results are on the host. Raises what the device raised."""
        self.download.wait()
        result = StepResult()
        for readout in self.plan.readouts:
            readout.read(result)
        result.lenvm.tokens += sum(len(segment.tokens) for segment in self.batch.lenvm_segments)
        return result


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of the main model on their way to the device."""

    tokens: Copy
    """[tokens] token ids; :data:`~engine.requests.core.PENDING` where the step before draws the token."""
    positions: Copy
    """[tokens]"""
    pending: Copy
    """Rows whose token the step before draws."""
    source: Copy
    """[pending] row of that token among the draws of the step before."""
    rows: Copy
    """Rows that readouts read: hidden rows first, then those whose logits are read."""


class Runner:
    """Owns the model and, through the attention backend, the keys and values. It knows neither queues nor the owners of slots."""

    def __init__(
        self,
        decoder: Model,
        attention: AttentionBackend | WholeAttention,
        eos_token_ids: Sequence[int],
        graphs: Sequence[StepGraphs] = (),
        lenvm: LenVMRunner | None = None,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
        threads: StepThreads | None = None,
        spellings: Sequence[bytes] = (),
        unit_tokens: Mapping[wire.LengthUnit, float] | None = None,
    ) -> None:
        """``graphs``: the first that has a bucket for a step computes it. ``threads``: chooses the thread for each step; by default
        the calling thread computes all. ``spellings``, ``unit_tokens``: see :class:`ReadoutContext`."""
        self._decoder = decoder
        self._attention = attention
        self._graphs = graphs
        self._lenvm = lenvm
        self._adapters = adapters or StepAdapters(decoder)
        self.images = images or StepImages()
        self._threads = threads
        self._context = ReadoutContext(
            decoder, tuple(eos_token_ids), self._adapters.class_logits, self._adapters.token_heads, spellings, unit_tokens or {}
        )
        self._device = decoder.embed.weight.device
        self._any_row = torch.zeros(int(isinstance(decoder, Decoder)), dtype=torch.int64, device=self._device)
        """For a step of which no row is read: one, so that a decoder computes keys and values. An encoder computes nothing."""
        self._drawn = torch.empty(0, dtype=torch.int64, device=self._device)
        """Tokens that the last step draws, on the device."""
        self._drawn_row: dict[Branch, int] = {}
        """Row of each branch in ``_drawn``."""

    def launch(self, batch: Batch) -> PendingStep:
        """Queue all segments of ``batch``, and the outputs that they ask for, on the device.

        Where that fails midway, wait for what is queued, because no :class:`PendingStep` will: its buffers are used again.
        """
        try:
            return self._launch(batch) if self._threads is None else self._threads.run(batch.load, partial(self._launch, batch))
        except Exception:
            self.wait_for_device()
            raise

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> PendingStep:
        self._adapters.begin(batch)
        self.images.compute(batch)
        plan, step, download = OutputPlan(batch, self._context), StepTensors(), Download(self._device)
        upload = Upload()
        for readout in plan.readouts:
            readout.upload(upload)
        if batch.segments:
            inputs = self._add_inputs(batch, plan, upload)
            upload.send(self._device)
            self.images.insert()
            self._compute(inputs, batch, plan, step)
        for readout in plan.main:
            readout.queue(step, download)
        if batch.lenvm_segments or plan.lenvm:
            step.guided = self._run_lenvm(batch, plan, step)
        for readout in plan.lenvm:
            readout.queue(step, download)
        self._keep_drawn(plan)
        download.send()
        return PendingStep(batch, plan, download)

    def wait_for_device(self) -> None:
        """Block until all queued work is done, and leave its results. Raises :class:`DeviceLost`."""
        nothing = Download(self._device)
        try:
            nothing.send()
            nothing.wait()
        except RuntimeError as error:
            raise DeviceLost(f"{self._device} computes nothing more") from error

    @property
    def replayed(self) -> int:
        """Steps so far that replayed a CUDA graph."""
        return sum(captured.replayed for captured in self._graphs)

    @property
    def replayed_lenvm_passes(self) -> int:
        """Passes of the length model so far that replayed a CUDA graph."""
        return 0 if self._lenvm is None else self._lenvm.replayed

    def _add_inputs(self, batch: Batch, plan: OutputPlan, upload: Upload) -> _Inputs:
        tokens = Tokens.of(batch.segments)
        self.images.place(tokens, batch.segments, upload)
        pending = np.flatnonzero(tokens.ids == PENDING)
        rows = [row for readout in plan.readouts for row in readout.hidden_rows]
        rows += [row for readout in plan.readouts for row in readout.logit_rows]
        self._adapters.upload(batch, rows, upload)
        return _Inputs(
            tokens=upload.add(tokens.ids),
            positions=upload.add(tokens.positions),
            pending=upload.add(pending),
            source=upload.add(self._draw_rows(batch.segments) if len(pending) else []),
            rows=upload.add(rows),
        )

    def _compute(self, inputs: _Inputs, batch: Batch, plan: OutputPlan, step: StepTensors) -> None:
        """Queue the main model: the hidden rows that readouts read, and the logits, in one product."""
        tokens = self._fill_pending(inputs.tokens.tensor, inputs.pending.tensor, inputs.source.tensor)
        hidden = self._forward(tokens, inputs.positions.tensor, batch.segments, inputs.rows.tensor)
        reading = plan.readouts
        *parts, rest = torch.split(
            hidden,
            [*(len(readout.hidden_rows) for readout in reading), sum(len(readout.logit_rows) for readout in reading)],
        )
        step.hidden = dict(zip(reading, parts, strict=True))
        if len(rest):
            branches = [branch for readout in reading if readout.logit_rows for branch in readout.branches]
            logits = self._logits(rest, branches)
            parts = list(torch.split(logits, [len(readout.logit_rows) for readout in reading]))
            step.logits = dict(zip(reading, parts, strict=True))

    def _logits(self, hidden: Tensor, branches: Sequence[Branch]) -> Tensor:
        """[rows, vocab] float32. ``branches``: of each row of ``hidden``."""
        return self._context.by_head(branches, lambda head, rows: head.logits(hidden[rows]).float())

    def _run_lenvm(self, batch: Batch, plan: OutputPlan, step: StepTensors) -> GuidedStep:
        """Queue one pass of the length model: the batch's segments on it, and the candidates of guided draws."""
        assert self._lenvm is not None
        valued = plan.length_values.segment_indices
        if plan.guided.empty:
            return self._lenvm.compute(batch.lenvm_segments, valued, self._resolve)
        return self._lenvm.draw_guided(step.logits[plan.guided], plan.guided.rows, batch.lenvm_segments, valued, self._resolve)

    def _keep_drawn(self, plan: OutputPlan) -> None:
        """Keep the drawn tokens on the device, because the next step may start from them."""
        drawing = [(readout.tokens, readout.branches) for readout in plan.readouts if readout.tokens is not None]
        if drawing:
            self._drawn = drawing[0][0] if len(drawing) == 1 else torch.cat([tokens for tokens, _ in drawing])
        branches = [branch for _, branches in drawing for branch in branches]
        self._drawn_row = {branch: row for row, branch in enumerate(branches)}

    def _forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment], rows: Tensor) -> Tensor:
        """Hidden ``rows``, [rows, hidden], from a CUDA graph where one fits."""
        if not (self.images.active or self._adapters.embeds):
            for captured in self._graphs:
                hidden = captured.forward(tokens, positions, segments, rows)
                if hidden is not None:
                    return hidden
        attend = self._attention.plan(segments)
        if 0 < len(rows) < len(tokens):
            return self._decoder(tokens, positions, attend, rows)  # type: ignore[no-any-return]
        hidden = self._decoder(tokens, positions, attend, None if len(rows) else self._any_row)
        return hidden.index_select(0, rows)  # type: ignore[no-any-return]

    def _draw_rows(self, segments: Sequence[ExtendSegment]) -> list[int]:
        """Row among the draws of the step before of each pending token, in the order of ``segments``."""
        rows = []
        for segment in segments:
            if segment.branch is not None:
                branch = segment.branch.main_branch or segment.branch
                if branch.pending and segment.tokens[-1] == PENDING:
                    rows.append(self._drawn_row[branch])
        return rows

    def _fill_pending(self, tokens: Tensor, pending: Tensor, source: Tensor) -> Tensor:
        """``tokens`` with those that the step before draws in the rows ``pending``."""
        return tokens.index_copy(0, pending, self._drawn.index_select(0, source)) if len(pending) else tokens

    def _resolve(self, tokens: Tensor, segments: Sequence[ExtendSegment]) -> Tensor:
        """Tokens of ``segments``, on the device, with those that the step before draws."""
        source = self._draw_rows(segments)
        if not source:
            return tokens
        upload = Upload()
        pending_copy, source_copy = upload.add(np.flatnonzero(Tokens.of(segments).ids == PENDING)), upload.add(source)
        upload.send(self._device)
        return self._fill_pending(tokens, pending_copy.tensor, source_copy.tensor)
