"""The contract between gateway and engine: tagged msgspec structs, msgpack over HTTP. No torch, no text.

HTTP face of an engine pod (every body is msgpack unless said otherwise):

==========================  ==============================================================================
``POST /score``             one :class:`Score` or :class:`ScoreItems` in, one :class:`Scored` or :class:`Failed` out
``POST /generate``          one :class:`Generate` in, a stream of frames out: :class:`Delta` ..., or :class:`Failed`
``POST /abort``             one :class:`Abort` in, 204 out; unknown ids are no error
``GET /info``               :class:`Info`
``GET /stats``              :class:`Stats`
``GET /tokenizer``          :class:`TokenizerFiles`
``GET /adapters``           :class:`Adapters`; its revision is in :data:`ADAPTERS_HEADER`
``POST /adapters/load``     one :class:`LoadAdapter` in, one :class:`Adapter` or :class:`Failed` out
``POST /adapters/unload``   one :class:`UnloadAdapter` in, 204 or :class:`Failed` out
``GET /livez`` ``/readyz``  200 or 503, plain text; ``/readyz`` has :data:`MODEL_HEADER` and :data:`ADAPTERS_HEADER`
``GET /metrics``            Prometheus text
==========================  ==============================================================================

A frame is a 4-byte little-endian length and that many bytes of msgpack (:func:`pack_frame`, :class:`FrameReader`).
The body of a failed call is a :class:`Failed` under the HTTP status that :data:`STATUS_OF_CODE` gives its code.
Closing the connection of ``/score`` or ``/generate`` aborts the request. Their headers ``traceparent`` and
``tracestate`` are the context of the caller's trace (https://www.w3.org/TR/trace-context/). An engine that was given tokens asks
every path but the last two rows for ``Authorization: Bearer TOKEN``.

Every accepted request ends with exactly one terminal message: ``Scored``, ``Failed``, or for a generation one ``Delta`` with
``finish`` set for each of its ``n`` sequences.
"""

from __future__ import annotations

import struct

import msgspec

from engine.wire.common import (
    ADAPTER_NAME,
    ADAPTERS_HEADER,
    IMAGE_TOKENS,
    MAX_IMAGES,
    MODEL_HEADER,
    STATUS_OF_CODE,
    Abort,
    Adapter,
    Adapters,
    Caller,
    ErrorCode,
    Failed,
    Image,
    LoadAdapter,
    UnloadAdapter,
    VisionInfo,
    image_digest,
    pack_ids,
)
from engine.wire.generation import (
    CONTROL_TOKEN,
    GRAMMAR_BOUNDS,
    GRAMMAR_LIMITS,
    MAX_BAD_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_NGRAM,
    NEUTRAL_SCALE,
    PROMPT_PART,
    SMALLEST_VALUE,
    Delta,
    DraftOptions,
    FinishReason,
    Generate,
    GrammarLimits,
    GrammarVocabulary,
    GuidanceMode,
    LengthConstraint,
    LengthGuidance,
    Logprobs,
    Sampling,
    Thinking,
    ThinkingLimit,
    prompt_parts,
)
from engine.wire.scoring import (
    Classes,
    Embedding,
    Labels,
    LengthValue,
    Likelihood,
    Score,
    Scored,
    ScoreItems,
    ScoreReadout,
    row_length,
)
from engine.wire.server import AttentionChoice, Info, Limits, Stats, TokenizerFiles, served_name

__all__ = [
    "ADAPTERS_HEADER",
    "ADAPTER_NAME",
    "CONTROL_TOKEN",
    "GRAMMAR_BOUNDS",
    "GRAMMAR_LIMITS",
    "IMAGE_TOKENS",
    "MAX_BAD_TOKENS",
    "MAX_DRAFT_TOKENS",
    "MAX_FRAME",
    "MAX_GRAMMAR_BYTES",
    "MAX_IMAGES",
    "MAX_NGRAM",
    "MEDIA_TYPE",
    "MODEL_HEADER",
    "NEUTRAL_SCALE",
    "PROMPT_PART",
    "SMALLEST_VALUE",
    "STATUS_OF_CODE",
    "Abort",
    "Adapter",
    "Adapters",
    "AttentionChoice",
    "Caller",
    "Classes",
    "Delta",
    "DraftOptions",
    "Embedding",
    "ErrorCode",
    "Failed",
    "FinishReason",
    "FrameReader",
    "Generate",
    "GrammarLimits",
    "GrammarVocabulary",
    "GuidanceMode",
    "Image",
    "Info",
    "Labels",
    "LengthConstraint",
    "LengthGuidance",
    "LengthValue",
    "Likelihood",
    "Limits",
    "LoadAdapter",
    "Logprobs",
    "Reply",
    "Request",
    "Sampling",
    "Score",
    "ScoreItems",
    "ScoreReadout",
    "Scored",
    "Stats",
    "Thinking",
    "ThinkingLimit",
    "TokenizerFiles",
    "UnloadAdapter",
    "VisionInfo",
    "encode",
    "image_digest",
    "pack_frame",
    "pack_ids",
    "prompt_parts",
    "row_length",
    "served_name",
]

Request = Score | ScoreItems | Generate | Abort
Reply = Scored | Delta | Failed
_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30
MEDIA_TYPE = "application/msgpack"
"""Type of every body of the contract."""
_encoder = msgspec.msgpack.Encoder()
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
