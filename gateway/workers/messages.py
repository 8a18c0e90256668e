"""Messages between the gateway and its text processes.

A frame is a header (:data:`HEADER`), a message as msgpack, and for some messages a body: bytes that are not copied into the
message. A worker answers each message with one message. The fork server also reports the end of a worker without a request.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from yardstick_llm.gateway.images.decode import Reason
from yardstick_llm.gateway.output.answer import Formats
from yardstick_llm.gateway.text.prepared import Bounds, Facts, Packed

HEADER = struct.Struct("<II?")
"""Length of the message, length of the body (both in bytes), and whether the sender ends after this frame."""


class Decode(msgspec.Struct, tag="decode", frozen=True):
    """Decode and check the body. The answer is :class:`Decoded`."""

    endpoint: str


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """An image that was fetched."""

    url: str
    size: int
    """Bytes of its content."""


class Read(msgspec.Struct, tag="read", frozen=True):
    """Decode the body and convert the request to token ids. The answer is :class:`Packed`."""

    endpoint: str
    text: str
    """Key of the model's tokeniser and template."""
    facts: Facts
    bounds: Bounds
    formats: Formats = Formats()
    earlier: int = 0
    """Bytes of the body, before the contents of ``fetched``, that are :attr:`gateway.requests.endpoint.Model.earlier`."""
    fetched: list[Fetched] = []
    """Images that were fetched; their contents are the last bytes of the body."""


class Decoded(msgspec.Struct, tag="decoded", frozen=True):
    """The decoded request without its bulk."""

    fields: bytes
    ignored: list[str]
    characters: int
    """:attr:`gateway.requests.endpoint.Endpoint.characters` for a tokeniser without safe cuts."""
    characters_cut: int
    """For one with safe cuts."""
    unbounded: bytes
    """As :meth:`gateway.requests.endpoint.Endpoint.unbounded` returns it."""


class Wanted(msgspec.Struct, tag="wanted", frozen=True):
    """The request names images by URLs that must be fetched before it can be read."""

    urls: dict[str, str]
    """The first field of the request with each URL."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request is invalid."""

    message: str
    param: str | None
    code: str | None
    image_reason: Reason | None = None
    """Reason of an :class:`InvalidImage`."""


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The request could not be read, through no fault of the client or for lack of memory."""

    reason: Literal["memory", "unknown_text", "fault"]
    """The job exceeded its memory limit; the worker does not know the model's tokeniser; or a bug, which the log describes."""


Job = Decode | Read
Answer = Decoded | Packed | Wanted | Refused | Broken


class Load(msgspec.Struct, tag="load", frozen=True):
    """To the fork server, with two open files: read ``wire.TokenizerFiles`` from the first, keep the tokeniser and template for all
    workers forked later, and write the :class:`VocabularyTable` to the second. The answer is :class:`Loaded`."""

    text: str


class Forget(msgspec.Struct, tag="forget", frozen=True):
    """To the fork server: drop a tokeniser and template. The answer is :class:`Loaded`."""

    text: str


class Fork(msgspec.Struct, tag="fork", frozen=True):
    """To the fork server, with the worker's end of a socket: fork a worker. The answer is :class:`Forked`."""

    job_mib: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """From the fork server: the answer to :class:`Load` and :class:`Forget`."""

    problem: str | None = None
    """Reason why the files cannot be used; None if they can."""


class Forked(msgspec.Struct, tag="forked", frozen=True):
    """From the fork server: a worker runs."""

    pid: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """From the fork server: a worker has ended."""

    pid: int
    signal: int
    """Number of the signal that ended it; 0 if none did."""


Order = Load | Forget | Fork
Report = Loaded | Forked | Ended


def frame(message: msgspec.Struct, body_bytes: int = 0, *, last: bool = False) -> bytes:
    """Return the header and ``message``; the caller appends the body."""
    packed = msgspec.msgpack.encode(message)
    return HEADER.pack(len(packed), body_bytes, last) + packed
