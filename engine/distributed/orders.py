"""Messages of rank 0 to the other processes, over each one's standard input in msgpack. No torch.

A worker starts with an :class:`Assignment`. It answers :data:`READY`, or one line that says why not, on its standard output when
its weights are loaded. Then it gets one :class:`Allocate` and a :class:`ComputeStep` for each step. It ends when its input closes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec
import numpy as np

from engine.batch import ExtendSegment
from engine.ints import EMPTY
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
