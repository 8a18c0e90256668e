"""One process's part of a decoder.

Query heads, key-value heads and the inner columns of the feed-forward layer are dealt out in equal, consecutive parts. A process
has the rows of the projections into them and the columns of the projections out of them, so each layer needs two sums over the
processes and nothing else. Embedding and norms are whole in every process; heads are in rank 0 only, which alone uses them.
Method: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053.

Experts are dealt out by their inner columns too, or whole, with ``--expert-parallel``: a process computes the rows of a step that
choose its experts, and the sum over the processes adds what the others compute. All processes have all rows, so none are exchanged.

Rank 0 orders the other processes over each one's standard input, in msgpack. A worker starts with an :class:`Assignment`. It
answers :data:`READY`, or one line that says why not, on its standard output when its weights are loaded. Then it gets one
:class:`Allocate` and a :class:`ComputeStep` for each step. It ends when its input closes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.ints import EMPTY
from engine.models.config import ExpertConfig, ModelConfig
from engine.models.decoder import MLP, Attend, Decoder, DecoderLayer
from engine.models.files import ModelError
from engine.models.formats.quantization import pack_head
from engine.models.loader import fill, read_checked
from engine.models.registry import family_of
from engine.requests.batch import ExtendSegment
from engine.requests.core import Request
from engine.settings import EngineSettings

READY = "ready"
LENGTH_BYTES = 8
"""Before each order: its length."""


class Assignment(msgspec.Struct, frozen=True):
    """Settings and rank of one process."""

    settings: EngineSettings
    rank: int
    """1 and up; rank 0 is the process that sends the orders."""
    port: int
    """Port of the local address where the processes find each other."""


class Allocate(msgspec.Struct, tag="allocate", frozen=True):
    """Make room for keys and values; comes once."""

    slots: int


class ComputeStep(msgspec.Struct, tag="step", frozen=True):
    """Compute these segments. Token ids and positions follow from device to device."""

    segments: list[tuple[bytes, bytes]]
    """Tokens and context of each run, int32."""

    @classmethod
    def of(cls, segments: Sequence[ExtendSegment]) -> ComputeStep:
        """The parts of ``segments`` that attention needs."""
        return cls([(segment.tokens.tobytes(), segment.context.tobytes()) for segment in segments])

    def unpack(self) -> list[ExtendSegment]:
        """The segments, of a placeholder request: attention does not read whose they are."""
        nobody = Request(id="", prefix=EMPTY)
        arrays = ((np.frombuffer(tokens, np.int32), np.frombuffer(context, np.int32)) for tokens, context in self.segments)
        return [ExtendSegment(nobody, None, tokens.copy(), context.copy()) for tokens, context in arrays]


Order = Allocate | ComputeStep

_encoder = msgspec.msgpack.Encoder()


def frame(order: Order) -> bytes:
    """``order`` as :func:`read_orders` takes it."""
    payload = _encoder.encode(order)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_orders(file: BinaryIO) -> Iterator[Order]:
    """Every order up to the end of ``file``."""
    decoder = msgspec.msgpack.Decoder(Order)
    while len(head := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
        length = int.from_bytes(head, "little")
        if len(payload := file.read(length)) < length:
            return
        yield decoder.decode(payload)


LOCAL = "127.0.0.1"


class ShardedDecoder(Decoder):
    """A :class:`Decoder` of its part's shape, which adds up what the others compute. For inference only.

    Raises :class:`ModelError` where the parts would not be equal.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, rank: int, size: int, expert_parallel: int = 1) -> None:
        super().__init__(part_of(config, rank, size, expert_parallel), dtype)
        self.whole = config
        self.rank = rank
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if rank > 0:  # only one process adds the bias to the sum
                layer.attention.o_proj.register_parameter("bias", None)
                if isinstance(layer.mlp, MLP):
                    layer.mlp.down_proj.register_parameter("bias", None)
            layer.attention.register_forward_hook(_sum_over_processes)
            layer.mlp.register_forward_hook(_sum_over_processes)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """See :meth:`Decoder.forward`. All processes call it with the same numbers of tokens and rows; those of rank 0 count."""
        given = torch.stack((tokens, positions))
        dist.broadcast(given, src=0)
        return super().forward(given[0], given[1], attend, rows)


def check_expert_parallel(settings: EngineSettings) -> None:
    """Raise :class:`ModelError` where experts cannot be shared by as many processes as are asked for."""
    processes = settings.tensor_parallel
    if settings.expert_parallel not in (1, processes):
        raise ModelError(
            f"--expert-parallel is {settings.expert_parallel}, but must be 1 or --tensor-parallel, which is {processes}."
        )


def part_of(config: ModelConfig, rank: int, size: int, expert_parallel: int = 1) -> ModelConfig:
    """The shape of one process's part. ``expert_parallel``: see :attr:`~engine.settings.EngineSettings.expert_parallel`."""
    dealt = {"num_heads": "attention heads", "num_kv_heads": "key-value heads", "intermediate_size": "feed-forward columns"}
    for key, what in dealt.items():
        if (count := getattr(config, key)) % size:
            raise ModelError(
                f"The model's {count} {what} cannot be shared evenly by {size} processes; "
                f"give --tensor-parallel a number that divides {count}."
            )
    problem = "normalises all heads together" if config.qk_norm_over_heads else None
    problem = "stores queries, keys and values as one" if config.fused_projections else problem
    if family_of(config.architecture).experts == "granite" and expert_parallel == 1:
        problem = "stores all experts as one, and --expert-parallel is 1"
    if problem is not None:
        raise ModelError(f"{config.architecture} {problem}, so --tensor-parallel cannot share it; leave it out.")
    parts = {key: getattr(config, key) // size for key in dealt}
    part = dataclasses.replace(config, **parts, experts=_experts_part(config, rank, size, expert_parallel))
    return part if rank == 0 else dataclasses.replace(part, lm_head=False, classes=())


def _experts_part(config: ModelConfig, rank: int, size: int, expert_parallel: int) -> ExpertConfig | None:
    """Every process has a part of the inner columns of each expert, or some of the experts, and a part of the shared one."""
    experts = config.experts
    if experts is None and expert_parallel > 1:
        raise ModelError(f"--expert-parallel shares experts, and {config.architecture} has none; leave it out.")
    if experts is None:
        return None
    if expert_parallel > 1:
        return _whole_experts(experts, rank, size)
    if experts.size % size or experts.shared_size % size:
        raise ModelError(
            f"The inner columns of the model's experts cannot be shared evenly by {size} processes; "
            f"give --tensor-parallel a number that divides {math.gcd(experts.size, experts.shared_size)}."
        )
    return dataclasses.replace(experts, size=experts.size // size, shared_size=experts.shared_size // size)


def _whole_experts(experts: ExpertConfig, rank: int, size: int) -> ExpertConfig:
    if experts.count % size or experts.shared_size % size:
        counted = "inner columns of the shared expert" if experts.count % size == 0 else "experts"
        count = experts.shared_size if experts.count % size == 0 else experts.count
        raise ModelError(
            f"The model's {count} {counted} cannot be shared evenly by {size} processes; give --tensor-parallel and "
            f"--expert-parallel a number that divides {count}."
        )
    held = experts.count // size
    return dataclasses.replace(experts, held=range(rank * held, (rank + 1) * held), shared_size=experts.shared_size // size)


def load_part(decoder: ShardedDecoder, directory: Path, quantize: str | None = None) -> None:
    """Fill ``decoder`` with its part of the weights, reading no more than that. Raises :class:`ModelError`.

    ``quantize``: as :func:`~engine.models.loader.load_model`; each part is quantised for itself (see
    :mod:`engine.models.formats.fp8`).
    """
    with torch.device("meta"):
        whole = Decoder(decoder.whole)
    fill(decoder, read_checked(directory, whole), quantize, decoder.rank)
    pack_head(decoder, quantize)
    decoder.eval()


def join(rank: int, size: int, port: int, device: torch.device, listener: socket.socket | None = None) -> None:
    """Form the group of all processes; returns when all are there. Rank 0 gives the socket that listens on ``port``."""
    names = (name for _, name in socket.if_nameindex())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next(name for name in names if name.startswith("lo")))  # loopback only
    fd = None if listener is None else listener.detach()
    store = dist.TCPStore(LOCAL, port, size, is_master=fd is not None, wait_for_workers=False, master_listen_fd=fd)  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _sum_over_processes(module: nn.Module, arguments: object, out: Tensor) -> Tensor:  # noqa: ARG001 (a forward hook)
    dist.all_reduce(out)
    return out
