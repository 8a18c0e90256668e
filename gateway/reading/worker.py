"""A worker process: decodes and tokenises one request at a time for the gateway.

The fork server forks it with all tokenisers in memory. It may be killed at any time, and a job that exceeds its memory limit ends
only this process.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec

from gateway.errors import InvalidRequest
from gateway.images.errors import InvalidImage
from gateway.process.deadline import keep_alarm
from gateway.process.parent import ending_with
from gateway.reading.endpoint import Endpoint, Model, TextSide
from gateway.reading.endpoints import ENDPOINTS
from gateway.text.prepared import pack
from gateway.workers.messages import HEADER, Answer, Broken, Decode, Decoded, Drop, Dropped, Job, Read, Refused, Wanted, Whole

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
"""Size of a job's body plus answer, in bytes, above which freed memory is returned to the system."""
KEPT_BYTES = 48 << 20
"""Growth of a worker's memory since its start, in bytes, above which it ends and another is forked."""
FIRST_BYTES = 1 << 16
"""Bytes of a job that are received at first."""
NICENESS = 5
"""If processors are scarce, the event loop, which serves all clients, gets three times a worker's share (man 7 sched)."""
MAX_MESSAGE = 2000
"""Most characters of an error message or parameter; some repeat a value of the request."""
MAX_IGNORED = 64

_job = msgspec.msgpack.Decoder(Job)


def run(connection: socket.socket, texts: Mapping[str, TextSide], job_mib: int) -> None:
    """Answer jobs until the gateway closes the connection."""
    die_with_parent()
    os.nice(NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_status_bytes("VmData") + (job_mib << 20), resource.RLIM_INFINITY))
    keep_alarm()
    gc.disable()  # collections would slow a job with millions of objects many times; its objects are freed at its end
    worker = Worker(texts)
    least = _status_bytes("VmRSS")
    while (received := receive(connection)) is not None:
        message, body = received
        size = len(body)
        packed = msgspec.msgpack.encode(worker.answer(_job.decode(message), body))
        del message, body, received
        last = False
        if size + len(packed) > LARGE_BYTES:
            give_memory_back()
            last = worker.rests and _status_bytes("VmRSS") - len(packed) - least > KEPT_BYTES
        connection.sendall(HEADER.pack(len(packed), 0, last) + packed)
        if last:
            return


class Extra(NamedTuple):
    """Settings of a request besides its body; see :class:`Model`."""

    earlier: bytes = b""
    fetched: Mapping[str, bytes] = MappingProxyType({})

    @classmethod
    def taken(cls, read: Read, body: bytearray) -> Extra:
        """Take what ``read`` describes from the end of ``body``."""
        fetched = {}
        for image in reversed(read.fetched):
            fetched[image.url] = _taken(body, image.size)
        return cls(_taken(body, read.earlier), fetched)


def _taken(body: bytearray, size: int) -> bytes:
    begin = len(body) - size
    end = bytes(body[begin:])
    del body[begin:]
    return end


class Worker:
    """Keeps the decoded request between the two steps."""

    def __init__(self, texts: Mapping[str, TextSide]) -> None:
        self._texts = texts
        self._endpoint: Endpoint[Any] | None = None
        self._request: Any = None

    @property
    def rests(self) -> bool:
        """Whether no request is kept."""
        return self._request is None

    def answer(self, job: Job, body: bytearray) -> Answer:
        """Carry out one step and return the answer. Raises no :class:`Exception`; a panic in the library ends the process."""
        try:
            read = job if isinstance(job, Read) else job.read if isinstance(job, Whole) else None
            extra = Extra.taken(read, body) if read is not None else Extra()
            if isinstance(job, Read):
                return self._read(job, extra)
            self._request = None
            if isinstance(job, Drop):
                return Dropped()
            self._endpoint = ENDPOINTS[job.endpoint]
            self._request, ignored = self._endpoint.decode(cast(bytes, body))  # decoders accept bytearray; a copy would be large
            if isinstance(job, Decode):
                return Decoded(
                    self._endpoint.pack_fields(self._request),
                    ignored[:MAX_IGNORED],
                    self._endpoint.characters(self._request, False),
                    self._endpoint.characters(self._request, True),
                    self._endpoint.unbounded(self._request),
                )
            return self._read(job.read, extra)
        except InvalidRequest as error:
            reason = error.reason if isinstance(error, InvalidImage) else None
            answer: Answer = Refused(_clipped(error.message), error.param and _clipped(error.param), error.code, reason)
        except MemoryError:
            answer = Broken("memory")
        except Exception:
            logger.exception("a request could not be read")
            answer = Broken("fault")
        except BaseException as error:  # a panic in the tokenizers library, whose locks may stay taken
            if "memory" in str(error):
                os.abort()  # as the library does where it cannot allocate; channel.py tells it from other crashes by the signal
            raise
        self._request = None
        return answer

    def _read(self, job: Read, extra: Extra) -> Answer:
        request, self._request = self._request, None
        if request is None or self._endpoint is None:
            return Broken("fault")
        if (text := self._texts.get(job.text)) is None:
            return Broken("unknown_text")
        if job.facts.vision is not None and (urls := self._endpoint.urls(request)) and not job.fetched:
            return Wanted(urls)
        model = Model(job.facts, text.tokenizer, job.bounds, text, job.formats, extra.earlier, extra.fetched)
        return pack(self._endpoint.read(request, model))


def receive(connection: socket.socket) -> tuple[bytes, bytearray] | None:
    """Receive a message and its body; None at the end of the connection. A small job takes one system call, because the gateway
    sends nothing more before its answer."""
    begin = _filled(connection, connection.recv(FIRST_BYTES), HEADER.size)
    if begin is None:
        return None
    message_bytes, body_bytes, _last = HEADER.unpack_from(begin)
    end = HEADER.size + message_bytes
    message = _filled(connection, begin[HEADER.size : end], message_bytes)
    body = _filled(connection, begin[end:], body_bytes)
    return None if message is None or body is None else (bytes(message), body)


def die_with_parent() -> None:
    """Ask the kernel to end this process with its parent. On other systems than Linux it ends with the socket."""
    arm = ending_with(os.getppid(), signal.SIGKILL, 0)
    if arm is not None:
        arm()


def give_memory_back() -> None:
    """Return freed memory to the system."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _filled(connection: socket.socket, begin: bytes | bytearray, size: int) -> bytearray | None:
    """Return ``begin`` and what follows it, at least ``size`` bytes in all; None if the other end closed the connection before."""
    data = bytearray(max(size, len(begin)))
    data[: len(begin)] = begin
    view, got = memoryview(data), len(begin)
    while got < size:
        count = connection.recv_into(view[got:])
        if not count:
            return None
        got += count
    return data


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"


def _status_bytes(name: str) -> int:
    """Return a memory size from ``/proc/self/status``, in bytes; 0 if it is not available."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
