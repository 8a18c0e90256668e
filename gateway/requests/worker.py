"""``python -m yardstick_llm.gateway.requests.worker``: holds the tokenisers in memory and forks worker processes that share them.

Reading a large ``tokenizer.json`` takes seconds, so the replacement of a killed worker must not read it again: a fork takes
milliseconds and shares the memory. The fork server handles no request. It has one thread, as forking requires.

A worker decodes and tokenises one request at a time for the gateway. It may be killed at any time, and a job that exceeds its
memory limit ends only this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.images.decode import InvalidImage
from yardstick_llm.gateway.presets.preset import PresetError, parse_preset
from yardstick_llm.gateway.process.bounds import keep_alarm
from yardstick_llm.gateway.process.signals import ending_with
from yardstick_llm.gateway.requests.catalogue import CATALOGUE, CATALOGUE_ITEMS
from yardstick_llm.gateway.requests.chat import CHAT
from yardstick_llm.gateway.requests.completions import COMPLETIONS
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model, TextSide
from yardstick_llm.gateway.requests.length import LENGTH
from yardstick_llm.gateway.requests.rerank import RERANK
from yardstick_llm.gateway.requests.responses import RESPONSES
from yardstick_llm.gateway.requests.score import SCORE
from yardstick_llm.gateway.requests.tei import TEI
from yardstick_llm.gateway.requests.texts import CLASSIFY, COHERE_EMBED, EMBEDDINGS
from yardstick_llm.gateway.requests.tokenize import DETOKENIZE, TOKENIZE
from yardstick_llm.gateway.text.chat_template import ChatTemplate
from yardstick_llm.gateway.text.prepared import pack
from yardstick_llm.gateway.text.preset_template import PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer
from yardstick_llm.gateway.text.vocabulary import TokenizerError
from yardstick_llm.gateway.workers.messages import (
    HEADER,
    Answer,
    Broken,
    Decode,
    Decoded,
    Ended,
    Forget,
    Fork,
    Forked,
    Job,
    Load,
    Loaded,
    Order,
    Refused,
    Report,
    Wanted,
    frame,
)

ENDPOINTS: dict[str, Endpoint[Any]] = {
    "score": SCORE,
    "rerank": RERANK,
    "classify": CLASSIFY,
    "embeddings": EMBEDDINGS,
    "cohere_embed": COHERE_EMBED,
    "tei": TEI,
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "length": LENGTH,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "catalogue": CATALOGUE,
    "catalogue_items": CATALOGUE_ITEMS,
}
NAMES = {endpoint.kind: name for name, endpoint in ENDPOINTS.items()}


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
    least = _status_bytes("VmRSS")
    while (received := receive(connection)) is not None:
        message, body = received
        size = len(body)
        packed = msgspec.msgpack.encode(answer(texts, _job.decode(message), body))
        del message, body, received
        last = False
        if size + len(packed) > LARGE_BYTES:
            give_memory_back()
            last = _status_bytes("VmRSS") - len(packed) - least > KEPT_BYTES
        connection.sendall(HEADER.pack(len(packed), 0, last) + packed)
        if last:
            return


def answer(texts: Mapping[str, TextSide], job: Job, body: bytearray) -> Answer:
    """Carry out one job. Raises no :class:`Exception`; a panic in the library ends the process."""
    endpoint: Endpoint[Any] = ENDPOINTS[job.endpoint]
    try:
        if isinstance(job, Decode):
            request, ignored = endpoint.decode(cast(bytes, body))  # decoders accept bytearray; a copy would be large
            return Decoded(
                endpoint.pack_fields(request),
                ignored[:MAX_IGNORED],
                endpoint.characters(request, False),
                endpoint.characters(request, True),
                endpoint.unbounded(request),
            )
        if (text := texts.get(job.text)) is None:
            return Broken("unknown_text")
        fetched = {image.url: _taken(body, image.size) for image in reversed(job.fetched)}
        earlier = _taken(body, job.earlier)
        request, _ = endpoint.decode(cast(bytes, body))
        if job.facts.vision is not None and (urls := endpoint.urls(request)) and not fetched:
            return Wanted(urls)
        model = Model(job.facts, text.tokenizer, job.bounds, text, job.formats, earlier, fetched)
        return pack(endpoint.read(request, model))
    except InvalidRequest as error:
        reason = error.reason if isinstance(error, InvalidImage) else None
        return Refused(_clipped(error.message), error.param and _clipped(error.param), error.code, reason)
    except MemoryError:
        return Broken("memory")
    except Exception:
        logger.exception("a request could not be read")
        return Broken("fault")
    except BaseException as error:  # a panic in the tokenizers library, whose locks may stay taken
        if "memory" in str(error):
            os.abort()  # as the library does where it cannot allocate; the gateway tells it from other crashes by the signal
        raise


def _taken(body: bytearray, size: int) -> bytes:
    """Take the last ``size`` bytes of ``body``."""
    begin = len(body) - size
    end = bytes(body[begin:])
    del body[begin:]
    return end


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


MAX_ORDER = 4096
_order = msgspec.msgpack.Decoder(Order)


class ForkServer:
    """Owns the tokenisers and templates, and the workers, which are its child processes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._texts: dict[str, TextSide] = {}

    def serve(self) -> None:
        """Carry out orders until the gateway closes the connection."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while True:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            data, files, _flags, _address = socket.recv_fds(self._control, MAX_ORDER, 2)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            if not data:
                return
            order = _order.decode(data[HEADER.size :])
            try:
                self._report(self._carry_out(order, files))
            finally:
                for file in files:
                    os.close(file)

    def _carry_out(self, order: Order, files: list[int]) -> Report:
        if isinstance(order, Load):
            return self._load(order, *files)
        if isinstance(order, Forget):
            self._texts.pop(order.text, None)
            return Loaded()
        return Forked(self._fork(order, *files))

    def _load(self, order: Load, given: int, table: int) -> Loaded:
        try:
            with open(given, "rb", closefd=False) as file:
                files = msgspec.msgpack.decode(file.read(), type=TokenizerFiles)
            tokenizer = Tokenizer.from_files(files)
            tokenizer.encode("a", parse_special_tokens=False)  # some broken structures fail only when they are used
            preset = _preset(files, tokenizer)
            packed = msgspec.msgpack.encode(msgspec.structs.replace(tokenizer.table, fitted=preset and preset.fitted))
        except (TokenizerError, msgspec.DecodeError) as error:
            return Loaded(str(error))
        except PresetError as error:
            return Loaded(f"the preset cannot be used: {error}")
        except Exception as error:  # the library raises bare Exception; one model must not end the text workers of all
            return Loaded(f"tokenizer.json cannot be used: {error}")
        template = ChatTemplate(files.chat_template, files.special_tokens, files.tool_template)
        self._texts[order.text] = TextSide(tokenizer, template, preset, tokenizer.grammar_compiler())
        with open(table, "wb", closefd=False) as file:
            file.write(packed)
        gc.collect()
        gc.freeze()  # prevents collections in workers from copying these pages
        return Loaded()

    def _fork(self, order: Fork, connection: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._be_worker(order, connection)
        return pid

    def _be_worker(self, order: Fork, connection: int) -> NoReturn:
        status = 1
        try:
            self._control.close()
            with socket.socket(fileno=connection) as channel:
                run(channel, self._texts, order.job_mib)
            status = 0
        except ConnectionError:  # the gateway has ended or closed the connection
            status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Report every worker that has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._report(Ended(pid, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0))

    def _report(self, report: Report) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.sendall(frame(report))


def _preset(files: TokenizerFiles, tokenizer: Tokenizer) -> PresetTemplate | None:
    """Return the model's preset. Raises :class:`PresetError`; an optional preset that does not fit is left out."""
    if files.preset is None:
        return None
    preset = parse_preset(files.preset.encode())
    try:
        return PresetTemplate(preset, tokenizer)
    except PresetError:
        if preset.optional:
            return None
        raise


def main() -> int:
    """Serve the socket whose file descriptor is the only argument."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process
    with socket.socket(fileno=int(sys.argv[1])) as control:
        ForkServer(control).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
