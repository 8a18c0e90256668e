"""Processes that train one length model, one on each GPU: each has the whole model and computes a part of the texts of a step, and
their gradients are summed. The first one starts the others, which end when it does, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from yardstick_llm.engine.runner.distributed.shard import LOCAL, form_group

LOST_SECONDS = 2.0
MEMBER = "YARDSTICK_LENVM_MEMBER"
"""Environment of the processes that the first one starts: rank, size and port, separated by colons."""


class Group(NamedTuple):
    """The place of this process among those that train together."""

    rank: int = 0
    size: int = 1

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor with its sum over the processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the thread that watches a lost process say so and end this one, where a sum over the processes fails first."""
        try:
            yield
        except RuntimeError:
            if self.size > 1:
                time.sleep(LOST_SECONDS)
            raise

    def leave(self) -> None:
        """End the connections to the others. All processes but the first end here, without Python's clean-up, which may abort a
        process whose thread waits for input."""
        if self.size > 1:
            dist.destroy_process_group()
        if self.rank:
            os._exit(0)


def is_member() -> bool:
    """Whether another process has started this one to train with it."""
    return MEMBER in os.environ


def join(processes: int, arguments: Sequence[str], kind: str) -> Group:
    """Form the group of ``processes``. ``arguments``: the command line of the others; ``kind``: cpu, or cuda for a GPU each."""
    listener = None
    if is_member():
        rank, size, port = map(int, os.environ[MEMBER].split(":"))
        threading.Thread(target=_end_with_input, daemon=True).start()
    elif processes == 1:
        return Group()
    else:
        listener = socket.create_server((LOCAL, 0))
        rank, size, port = 0, processes, listener.getsockname()[1]
        for other in range(1, size):
            _start(arguments, f"{other}:{size}:{port}")
    form_group(rank, size, port, torch.device(kind, rank if kind == "cuda" else 0), listener)
    return Group(rank, size)


def _start(arguments: Sequence[str], member: str) -> None:
    command = [sys.executable, "-m", "yardstick_llm.engine.training", *arguments]
    environment = os.environ | {MEMBER: member}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)  # noqa: S603 - our own module
    threading.Thread(target=_watch, args=(process, member.partition(":")[0]), daemon=True).start()


def _watch(process: subprocess.Popen[bytes], rank: str) -> None:
    if code := process.wait():
        os.write(2, f"yardstick: process {rank} of the training ended with exit code {code}\n".encode())
        os._exit(1)


def _end_with_input() -> None:
    while os.read(0, 1):  # not through sys.stdin, which is locked while a thread reads
        pass
    os._exit(1)
