"""Messages as bytes: msgpack, and frames of a stream."""

from __future__ import annotations

import struct
from array import array

import msgspec

from engine.wire.common import Abort, Failed
from engine.wire.generation import Delta, Generate
from engine.wire.scoring import Score, Scored, ScoreItems

Request = Score | ScoreItems | Generate | Abort
Reply = Scored | Delta | Failed
_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30
MEDIA_TYPE = "application/msgpack"
"""Type of every body of the contract."""
_encoder = msgspec.msgpack.Encoder(enc_hook=array.tolist)
"""Token ids may be arrays in messages that are sent; they are encoded as lists."""
_reply = msgspec.msgpack.Decoder(Reply)


def encode(message: msgspec.Struct) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def pack_frame(message: msgspec.Struct) -> bytes:
    """One message as a length-prefixed frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into :data:`Reply` messages, whatever the chunks it arrives in."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        """``max_frame``: most bytes of a message."""
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Reply]:
        """Return the messages completed by ``chunk``. Raises ``msgspec.DecodeError`` on garbage."""
        if not self._buffer and 0 < int.from_bytes(chunk[:4], "little") == len(chunk) - 4:
            return [_reply.decode(chunk[4:])]  # one message, as nearly always
        replies: list[Reply] = []
        self._buffer += chunk
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_frame:
                raise msgspec.DecodeError(f"frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            replies.append(_reply.decode(bytes(memoryview(self._buffer)[_LENGTH.size : end])))
            del self._buffer[:end]
        return replies

    @property
    def pending(self) -> int:
        """Bytes of an incomplete message; not 0 at the end of a stream means that it was cut off."""
        return len(self._buffer)
