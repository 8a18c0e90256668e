"""The rows with an adapter of steps that are replayed from CUDA graphs: their blocks are in a table of fixed address and size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.lora.linear import StepRows
from engine.lora.slots import DeviceSlots
from kernels.lora_layout import FEW_ROWS, ROW_BLOCKS, LoraRows, block_runs, most_blocks, padded_rank

COLUMNS = 3
"""Numbers of a block."""


class CapturedRows:
    """Gives the decoder's projections the table while a step is captured, and fills it before each replay.

    Kernels find an adapter's matrices and ranks in the table of its slot, so a graph holds for all adapters that are ever placed.
    """

    def __init__(self, step: StepRows, slots: DeviceSlots, max_rank: int, buckets: Sequence[int]) -> None:
        """``step``: the rows that the projections read. ``buckets``: tokens of the captured steps."""
        self._step, self._places, self._max_rank = step, slots.count, padded_rank(max_rank)
        # The largest bucket has large blocks, so that the kernels of both sizes are compiled while graphs are captured.
        self._few = min(FEW_ROWS * self._places, max(FEW_ROWS, max(buckets) - 1))
        numbers = max(COLUMNS * self._blocks(tokens) for tokens in buckets)
        self._table = torch.zeros(numbers, dtype=torch.int64, device=slots.device)

    @property
    def active(self) -> bool:
        """Whether the step that is being launched has a request with an adapter."""
        return self._step.tokens > 0

    @contextmanager
    def captured(self, tokens: int) -> Iterator[None]:
        """The projections of a step of ``tokens`` read the table."""
        self._table.zero_()
        self._step.tokens = tokens
        self._step.all = LoraRows((), self._within(tokens), self._size(tokens), most_rank=self._max_rank)
        try:
            yield
        finally:
            self._step.tokens, self._step.all = 0, None

    def fill(self, tokens: int) -> None:
        """Queue the copy of the blocks of the step that is being launched, padded for a graph of ``tokens``."""
        assert self._step.all is not None
        blocks, _ = block_runs(self._step.all.runs, tokens, self._size(tokens))
        table = self._within(tokens)
        packed = torch.zeros(len(table), dtype=torch.int64, pin_memory=table.is_cuda)
        packed[: blocks.size] = torch.from_numpy(blocks.reshape(-1))
        table.copy_(packed, non_blocking=True)

    def _within(self, tokens: int) -> Tensor:
        return self._table[: COLUMNS * self._blocks(tokens)]

    def _blocks(self, tokens: int) -> int:
        return most_blocks(tokens, self._places, self._size(tokens))

    def _size(self, tokens: int) -> int:
        return ROW_BLOCKS[tokens > self._few]
