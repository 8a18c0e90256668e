"""Processes that train one length model, one on each GPU: each has the whole model and computes a part of the texts of a step, and
their gradients are summed. The first one starts the others, which end when it does, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LOCAL = "127.0.0.1"
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

    def leave(self) -> None:
        """End the connections to the others."""
        if self.size > 1:
            dist.destroy_process_group()


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
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    fd = None if listener is None else listener.detach()
    store = dist.TCPStore(LOCAL, port, size, is_master=fd is not None, wait_for_workers=False, master_listen_fd=fd)  # type: ignore[attr-defined]
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    return Group(rank, size)


def _start(arguments: Sequence[str], member: str) -> None:
    command = [sys.executable, "-m", "yardstick_llm.engine.training", *arguments]
    environment = os.environ | {MEMBER: member}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)  # noqa: S603 - our own module
    threading.Thread(target=_watch, args=(process, member.partition(":")[0]), daemon=True).start()


def _watch(process: subprocess.Popen[bytes], rank: str) -> None:
    if code := process.wait():
        print(f"yardstick: process {rank} of the training ended with exit code {code}", file=sys.stderr, flush=True)
        os._exit(1)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
