"""Messages between the gateway and its text processes.

A frame is a header (:data:`HEADER`), a message as msgpack, and for some messages a body: bytes that are not copied into the
message. Between gateway and worker each message is answered by one message. The fork server also reports the end of a worker
unasked.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from gateway.text.bounds import Bounds
from gateway.text.facts import Facts
from gateway.text.prepared import Packed

HEADER = struct.Struct("<II?")
"""Bytes of the message, bytes of the body, and whether the sender ends after this frame."""


class Decode(msgspec.Struct, tag="decode", frozen=True):
    """Decode and check the body, and keep the request for :class:`Read`. Answered by :class:`Decoded`."""

    endpoint: str


class Read(msgspec.Struct, tag="read", frozen=True):
    """Turn the request into token ids. Answered by :class:`Packed`."""

    text: str
    """Key of the model's text side."""
    facts: Facts
    bounds: Bounds


class Whole(msgspec.Struct, tag="whole", frozen=True):
    """Both at once; answered by :class:`Packed`."""

    endpoint: str
    read: Read


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """Forget the request. Answered by :class:`Dropped`."""


class Decoded(msgspec.Struct, tag="decoded", frozen=True):
    """The request without its bulk."""

    fields: bytes
    ignored: list[str]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The client's mistake."""

    message: str
    param: str | None
    code: str | None


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The request could not be read."""

    reason: Literal["memory", "unknown_text", "fault"]
    """It needed more memory than a job may have; the worker is older than the model; a fault of ours, which the log describes."""


class Dropped(msgspec.Struct, tag="dropped", frozen=True):
    """The request is forgotten."""


Job = Decode | Read | Whole | Drop
Answer = Decoded | Packed | Refused | Broken | Dropped


class Load(msgspec.Struct, tag="load", frozen=True):
    """To the fork server, with two open files: read ``wire.TokenizerFiles`` from the first, keep the text side for all workers that
    are forked from now on, and write its :class:`VocabularyTable` to the second. Answered by :class:`Loaded`."""

    text: str


class Forget(msgspec.Struct, tag="forget", frozen=True):
    """To the fork server: drop a text side. Answered by :class:`Loaded`."""

    text: str


class Fork(msgspec.Struct, tag="fork", frozen=True):
    """To the fork server, with the worker's end of a socket. Answered by :class:`Forked`."""

    job_mib: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """From the fork server."""

    problem: str | None = None
    """Why the files cannot be used."""


class Forked(msgspec.Struct, tag="forked", frozen=True):
    """From the fork server: a worker runs."""

    pid: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """From the fork server: a worker has ended."""

    pid: int
    signal: int
    """That ended it; 0 for none."""


Order = Load | Forget | Fork
Report = Loaded | Forked | Ended


def frame(message: msgspec.Struct, body_bytes: int = 0, *, last: bool = False) -> bytes:
    """``message`` as the beginning of a frame; the body follows it."""
    packed = msgspec.msgpack.encode(message)
    return HEADER.pack(len(packed), body_bytes, last) + packed
