"""The adapters of a step: their slots on the device, and the runs of rows that each of them has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Copy, Upload
from engine.lora.linear import StepRows, UploadedRows
from engine.lora.slots import DeviceSlots
from engine.models.decoder import Decoder
from engine.models.modules import TokenHead
from engine.requests.core import Branch
from kernels.linear import linear
from kernels.lora_layout import LoraRun, block_runs


class StepAdapters:
    """Prepares the decoder's projections for each step. It does no work in steps without adapters."""

    def __init__(self, decoder: Decoder, slots: DeviceSlots | None = None, rows: StepRows | None = None) -> None:
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
        """See :class:`engine.readouts.base.ReadoutContext`."""
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
        """See :class:`engine.readouts.base.ReadoutContext`."""
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
