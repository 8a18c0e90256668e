"""Rank 0: the process of the loop. It starts the others, and tells them of every step before it computes its own part."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.ints import Ints
from engine.models.config import load_config
from engine.models.decoder import Attend, FusedAttend, PlainAttend
from engine.models.files import ModelError
from engine.models.formats.quantization import format_of
from engine.requests.batch import ExtendSegment
from engine.runner.attention.base import AttentionBackend
from engine.runner.distributed.shard import (
    LOCAL,
    READY,
    Allocate,
    Assignment,
    ComputeStep,
    Order,
    ShardedDecoder,
    frame,
    join,
    load_part,
)
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class PartLost(Exception):
    """A step failed in the middle, and the processes no longer agree on where they are. The engine has to start again.

    No RuntimeError, because those end the step's requests only.
    """


class Workers:
    """The processes of rank 1 and up. They end when this process does, however it ends."""

    def __init__(self, settings: EngineSettings) -> None:
        self._size = settings.tensor_parallel
        self._listener = socket.create_server((LOCAL, 0))
        self._port: int = self._listener.getsockname()[1]
        self._processes = [_start(Assignment(settings, rank, self._port)) for rank in range(1, self._size)]

    def join(self, device: torch.device) -> None:
        """Wait until all have loaded their part, and form the group with them. Raises :class:`ModelError` where one cannot."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            answer = process.stdout.readline().decode().strip()
            if answer != READY:
                raise ModelError(answer or f"Process {rank} of the model ended while it loaded its part.")
            threading.Thread(target=_end_with, args=(process, rank), daemon=True).start()
        join(0, self._size, self._port, device, self._listener)

    def send(self, order: Order) -> None:
        """To all of them. Raises OSError where one is gone."""
        message = frame(order)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(message)
            process.stdin.flush()


class LeadingDecoder(ShardedDecoder):
    """Rank 0's part. Its :meth:`forward` makes every process compute the segments for which attention was last planned."""

    def __init__(self, directory: Path, dtype: torch.dtype, settings: EngineSettings, device: torch.device) -> None:
        super().__init__(load_config(directory, settings.max_context), dtype, 0, settings.tensor_parallel, settings.expert_parallel)
        self._planned: Sequence[ExtendSegment] = ()
        self._workers = Workers(settings)  # the workers load their parts while this process loads its own
        load_part(self, directory, format_of(settings.quantize, device, dtype))
        self.to(device)
        self._workers.join(device)

    def lead(self, attention: AttentionBackend) -> AttentionBackend:
        """``attention`` for this process's part; the other processes get room for as many tokens."""
        self._workers.send(Allocate(attention.kv.slots))
        return LeadingAttention(attention, self)

    def plan(self, segments: Sequence[ExtendSegment]) -> None:
        """Announce that the next :meth:`forward` computes ``segments``."""
        self._planned = segments

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """See :meth:`Decoder.forward`. All rows are computed, because the other processes do not know ``rows``. Raises
        :class:`PartLost`.
        """
        try:
            self._workers.send(ComputeStep.of(self._planned))
            hidden = super().forward(tokens, positions, attend)
            return hidden if rows is None else hidden.index_select(0, rows)
        except (RuntimeError, MemoryError, OSError) as error:
            raise PartLost("a step failed in one of the processes that share the model") from error


class LeadingAttention(AttentionBackend):
    """Another backend, which lets the decoder know what is planned."""

    def __init__(self, backend: AttentionBackend, decoder: LeadingDecoder) -> None:
        super().__init__(backend.kv)
        self._backend = backend
        self._decoder = decoder

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        self._decoder.plan(segments)
        return self._backend.plan(segments)

    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        raise NotImplementedError("length models are not shared by processes")


def _start(assignment: Assignment) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "engine.runner.distributed.worker", msgspec.json.encode(assignment).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 (this program's own module)


def _end_with(process: subprocess.Popen[bytes], rank: int) -> None:
    """A group that has lost a process would wait for it, so the whole engine ends."""
    code = process.wait()
    logger.critical("process %d of the model ended with exit code %d, and the engine ends with it", rank, code)
    logging.shutdown()
    os._exit(1)
