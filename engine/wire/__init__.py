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

from engine.wire.adapters import ADAPTER_NAME, Adapter, Adapters, LoadAdapter, UnloadAdapter
from engine.wire.common import ADAPTERS_HEADER, MODEL_HEADER, STATUS_OF_CODE, Abort, Caller, ErrorCode, Failed
from engine.wire.frames import MAX_FRAME, MEDIA_TYPE, FrameReader, Reply, Request, encode, pack_frame
from engine.wire.generation import (
    MAX_DRAFT_TOKENS,
    MAX_NGRAM,
    PROMPT_PART,
    Delta,
    DraftOptions,
    FinishReason,
    Generate,
    Logprobs,
    prompt_parts,
)
from engine.wire.ids import pack_ids
from engine.wire.images import IMAGE_TOKENS, MAX_IMAGES, Image, VisionInfo, image_digest
from engine.wire.sampling import (
    CONTROL_TOKEN,
    GRAMMAR_BOUNDS,
    GRAMMAR_LIMITS,
    MAX_BAD_TOKENS,
    MAX_GRAMMAR_BYTES,
    NEUTRAL_SCALE,
    SMALLEST_VALUE,
    GrammarLimits,
    GuidanceMode,
    LengthConstraint,
    LengthGuidance,
    Sampling,
    Thinking,
    ThinkingLimit,
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
from engine.wire.vocabulary import GrammarVocabulary

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
