"""One process's part of a decoder, and rank 0: the process of the loop, which starts the others and tells them of every step before
it computes its own part.

Query heads, key-value heads and the inner columns of the feed-forward layer are dealt out in equal, consecutive parts. A process
has the rows of the projections into them and the columns of the projections out of them, so each layer needs two sums over the
processes and nothing else. Embedding and norms are whole in every process; heads are in rank 0 only, which alone uses them.
Method: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053.

Experts are dealt out by their inner columns too, or whole, with ``--expert-parallel``: a process computes the rows of a step that
choose its experts, and the sum over the processes adds what the others compute. All processes have all rows, so none are exchanged.

Rank 0 orders the other processes over each one's standard input, in msgpack; those of other nodes through
:mod:`engine.runner.distributed.group`. A worker starts with an :class:`~engine.runner.distributed.group.Assignment`. It answers
``ready``, or one line that says why not, on its standard output when its weights are loaded. Then it gets one :class:`Join`, one
:class:`Allocate` and a :class:`ComputeStep` for each step. It ends when its input closes. Whether a step is replayed from a CUDA
graph follows from its segments, in each process alike.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from yardstick_llm.engine.ints import EMPTY, Ints
from yardstick_llm.engine.models.config import ExpertConfig, ModelConfig, load_config
from yardstick_llm.engine.models.decoder import MLP, Attend, Decoder, DecoderLayer, FusedAttend, PlainAttend
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import CPU, fill, fingerprint, finish, layers_format, read_checked
from yardstick_llm.engine.models.registry import family_of
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.requests.core import Request
from yardstick_llm.engine.runner.attention.base import AttentionBackend
from yardstick_llm.engine.runner.distributed.group import LENGTH_BYTES, READY, Assignment, Nodes, address_of, end, frame
from yardstick_llm.engine.settings import EngineSettings

T = TypeVar("T")


class Join(msgspec.Struct, tag="join", frozen=True):
    """All have loaded their parts: form the group. Comes once."""


class Allocate(msgspec.Struct, tag="allocate", frozen=True):
    """Make room for keys and values, and capture steps together with all processes; comes once."""

    slots: int
    captured: int
    """Most tokens of a step; 0 where none are captured."""


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
        placeholder = Request(id="", prefix=EMPTY)
        arrays = ((np.frombuffer(tokens, np.int32), np.frombuffer(context, np.int32)) for tokens, context in self.segments)
        return [ExtendSegment(placeholder, None, tokens.copy(), context.copy()) for tokens, context in arrays]


Order = Join | Allocate | ComputeStep


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

    def compute(self, work: Callable[[], T]) -> T:
        """Run this process's part of what all do together."""
        return work()

    def least(self, number: int) -> int:
        """The least of the numbers that all processes give at the same time. Waits for the device."""
        given = torch.tensor(number, dtype=torch.int64, device=self.embed.weight.device)
        dist.all_reduce(given, dist.ReduceOp.MIN)
        return int(given.item())


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
    problem = "stores gate and up as one" if config.fused_mlp else problem
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


def load_part(decoder: ShardedDecoder, directory: Path, quantize: str | None = None, device: torch.device = CPU) -> None:
    """Fill ``decoder`` with its part of the weights, reading no more than that, but for codes, which are read whole and cut. Raises
    :class:`ModelError`.

    ``quantize``, ``device``: as for :func:`~engine.models.loader.load_model`; each part is quantised for itself (see
    :mod:`engine.models.formats.fp8`).
    """
    with torch.device("meta"):
        whole = Decoder(decoder.whole)
    fill(decoder, read_checked(directory, whole), quantize, decoder.rank, device)
    finish(decoder, directory, quantize)


def part_format(settings: EngineSettings, device: torch.device, dtype: torch.dtype) -> str | None:
    """The format of layers in all processes alike: rank 0 has decided on ``dequantize``."""
    return layers_format(settings, device, dtype, keeps_codes=settings.dequantize == "off")


def group_fingerprint(directory: Path, dtype: torch.dtype, settings: EngineSettings, config: ModelConfig) -> str:
    """Return the fingerprint of the model, which must be equal on all nodes; empty for a single node."""
    if settings.nnodes == 1:
        return ""
    return fingerprint(directory, dtype, settings.quantize, settings.tensor_parallel, settings.kv_dtype, config)


def join(rank: int, settings: EngineSettings, port: int, device: torch.device, listener: socket.socket | None = None) -> None:
    """Form the group of all processes, see :func:`form_group`."""
    local = settings.nnodes == 1 or address_of(settings).is_loopback
    form_group(rank, settings.tensor_parallel, port, device, listener, local=local)


def form_group(
    rank: int, size: int, port: int, device: torch.device, listener: socket.socket | None = None, *, local: bool = True
) -> None:
    """Form the group of ``size`` processes; returns when all are there. Rank 0 gives the socket that listens on ``port``.

    ``local``: all are on this machine. Processes of several machines use the address of the host's name, or the interface of
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME``.
    """
    if local:
        names = (name for _, name in socket.if_nameindex())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", next(name for name in names if name.startswith("lo")))  # loopback only
    fd = None if listener is None else listener.detach()
    store = dist.TCPStore(LOCAL, port, size, is_master=fd is not None, wait_for_workers=False, master_listen_fd=fd)  # type: ignore[attr-defined]
    if device.type == "cuda":
        # Otherwise NCCL registers the buffers of captured collectives, and processes wait for each other in the middle of a capture
        # (ncclNvlsGraphRegisterBuffer in its src/transport/nvls.cc). If the capture of one fails, the others wait forever.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _sum_over_processes(module: nn.Module, arguments: object, out: Tensor) -> Tensor:  # noqa: ARG001 (a forward hook)
    dist.all_reduce(out)
    return out


class PartLost(Exception):
    """A step failed in the middle, and the processes no longer agree on where they are. The engine has to start again.

    No RuntimeError, because those end the step's requests only.
    """


class Workers:
    """The processes of rank 1 and up, on this node and on the others. Those on this node end when this process does, however it
    ends."""

    def __init__(self, settings: EngineSettings, fingerprint: str = "") -> None:
        """``settings``: with the device, ``fingerprint``: of the model, both if there are other nodes.

        Raises :class:`ModelError`.
        """
        self._settings = settings
        self._listener = socket.create_server((LOCAL, 0))
        self._port: int = self._listener.getsockname()[1]
        self._nodes = Nodes(settings, fingerprint, self._port) if settings.nnodes > 1 else None
        self._processes = [_start(Assignment(settings, rank, self._port)) for rank in range(1, settings.local_processes)]

    def join(self, device: torch.device) -> None:
        """Wait until all have loaded their part, and form the group with them. Raises :class:`ModelError` where one cannot."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            answer = process.stdout.readline().decode().strip()
            if answer != READY:
                raise ModelError(answer or f"Process {rank} of the model ended while it loaded its part.")
            threading.Thread(target=_end_with, args=(process, rank), daemon=True).start()
        if self._nodes is not None:
            self._nodes.wait()
        self.send(Join())
        join(0, self._settings, self._port, device, self._listener)

    def send(self, order: Order) -> None:
        """To all of them. Raises OSError where one is gone."""
        message = frame(order)
        if self._nodes is not None:
            self._nodes.send(message)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(message)
            process.stdin.flush()


class LeadingDecoder(ShardedDecoder):
    """Rank 0's part. Its :meth:`compute` makes every process compute the segments that were last planned."""

    def __init__(self, directory: Path, dtype: torch.dtype, settings: EngineSettings, device: torch.device) -> None:
        super().__init__(load_config(directory, settings.max_context), dtype, 0, settings.tensor_parallel, settings.expert_parallel)
        self._planned: Sequence[ExtendSegment] | None = None
        settings = msgspec.structs.replace(settings, device=device.type)
        # the workers load their parts while this process loads its own
        self._workers = Workers(settings, group_fingerprint(directory, dtype, settings, self.config))
        load_part(self, directory, part_format(settings, device, dtype), device)
        self.to(device)
        self._workers.join(device)

    def lead(self, attention: AttentionBackend, captured: int) -> AttentionBackend:
        """``attention`` for this process's part; the other processes get room for as many tokens. ``captured``: see
        :class:`Allocate`."""
        self._workers.send(Allocate(attention.kv.slots, captured))
        return LeadingAttention(attention, self)

    def plan(self, segments: Sequence[ExtendSegment]) -> None:
        """Announce that the next :meth:`compute` is a step of ``segments``."""
        self._planned = segments

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """See :meth:`Decoder.forward`. All rows are computed, because the other processes do not know ``rows``. Raises
        :class:`PartLost`.
        """
        hidden = self.compute(partial(super().forward, tokens, positions, attend))
        return hidden if rows is None else hidden.index_select(0, rows)

    def compute(self, work: Callable[[], T]) -> T:
        """Tell the others of the step that is planned, and run ``work``. Without one, as in a capture, the others come to it by
        themselves. Raises :class:`PartLost`."""
        planned, self._planned = self._planned, None
        if planned is None:
            return work()
        try:
            self._workers.send(ComputeStep.of(planned))
            return work()
        except (RuntimeError, MemoryError, OSError) as error:
            raise PartLost("a step failed in one of the processes that share the model") from error


class LeadingAttention(AttentionBackend):
    """Another backend, which lets the decoder know what is planned."""

    def __init__(self, backend: AttentionBackend, decoder: LeadingDecoder) -> None:
        super().__init__(backend.kv)
        self._backend = backend
        self._decoder = decoder

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        attend = self._backend.plan(segments)
        self._decoder.plan(segments)
        return attend

    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        raise NotImplementedError("length models are not shared by processes")


def _start(assignment: Assignment) -> subprocess.Popen[bytes]:
    return subprocess.Popen(assignment.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 (this program's own module)


def _end_with(process: subprocess.Popen[bytes], rank: int) -> None:
    code = process.wait()
    end(f"process {rank} of the model ended with exit code {code}, and the engine ends with it")
