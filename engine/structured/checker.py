"""The vocabulary of a model for grammars, and the first compilation of each new grammar in a child process, which is ended when it
takes too much time or memory.

llguidance cannot be interrupted, its limits do not bound all of its work (``multipleOf`` with a large number compiles for minutes),
and the heap of an engine keeps freed memory (:mod:`engine.server.loop_client`). Therefore a process that has only the vocabulary,
``python -m yardstick_llm.engine.structured.checker SOCKET``, forks a child for each grammar. The engine compiles what its child
could compile.

Control tokens never match text in a grammar; a grammar names them (``<|im_end|>``). An added token is one if ``tokenizer.json``
marks it as special, or if it is spelled in angle brackets (``<tool_call>``) or with a bar beside a bracket.

llguidance tokenises texts that a grammar forces, such as the keys of an object. Its own tokeniser would make control tokens of
texts that spell them, so it gets a tokeniser whose control tokens have secret spellings.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from yardstick_llm.engine.wire import CONTROL_TOKEN, GRAMMAR_BOUNDS, GRAMMAR_LIMITS, GrammarVocabulary


class VocabularyError(ValueError):
    """The tokeniser cannot be used for grammars."""


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, and what another process needs to compile grammars for it (:func:`without_tokenizer`)."""

    tokenizer: LLTokenizer
    tokens: list[bytes]
    controls: list[int]
    eos_token_ids: Sequence[int]


def load_vocabulary(tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Read the vocabulary of a model with ``vocab_size`` rows in its head; rows without a token (padding) are never allowed.

    eos_token_ids: at least one. Raises :class:`VocabularyError`.
    """
    try:
        document = msgspec.json.decode(tokenizer_json)
        controls = {token["id"]: token["content"] for token in document.get("added_tokens") or [] if _is_control(token)}
        plain = LLTokenizer(_with_secret_controls(document, controls))
        size = min(plain.vocab_size, vocab_size)
        tokens = [controls[id].encode() if id in controls else plain.decode_bytes([id]) for id in range(size)]
        tokens += [b""] * (vocab_size - size)
        known = [id for id in controls if id < vocab_size]
        vocabulary = GrammarVocabulary(tokens, known, eos_token_ids[0], plain.tokenize_bytes)
        tokenizer = LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=list(eos_token_ids))
        return Vocabulary(tokenizer, tokens, known, eos_token_ids)
    except BaseException as error:  # the library raises ValueError, and its panics are no Exception
        raise VocabularyError(f"tokenizer.json cannot be used for grammars: {str(error).partition(chr(10))[0]}") from error


def without_tokenizer(tokens: list[bytes], controls: list[int], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return a vocabulary that compiles grammars, and takes the longest token first instead of tokenising as the model does. A
    process with 151,643 tokens takes 78 MiB, and 187 MiB with the tokeniser."""
    made: list[LLTokenizer] = []

    def encode(text: bytes) -> list[int]:
        return made[0].greedy_tokenize(text.decode(errors="replace")) if made else []

    wrapper = llguidance.TokenizerWrapper(GrammarVocabulary(tokens, controls, eos_token_ids[0], encode))
    made.append(LLTokenizer(wrapper, eos_token=list(eos_token_ids)))
    return made[0]


def _is_control(token: dict[str, Any]) -> bool:
    return bool(token["special"]) or CONTROL_TOKEN.fullmatch(token["content"]) is not None


def _with_secret_controls(document: dict[str, Any], controls: dict[int, str]) -> str:
    """Return ``tokenizer.json`` with other spellings of the control tokens, which no text contains."""
    secret = secrets.token_hex(16)
    added = [
        token | {"content": f"\ue000{secret}{token['id']}\ue001", "special": True} if token["id"] in controls else token
        for token in document.get("added_tokens") or []
    ]
    return msgspec.json.encode(document | {"added_tokens": added}).decode()


LIMITS = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS._asdict())
STACK_BYTES = 2 << 20
"""Stack of a child, which is less than that of the engine's threads."""
LEAST_BYTES = 64 << 10
"""Memory of the smallest grammar, in addition to its text."""
NICE = 5
"""Children leave the processors to the steps of the engine."""
_ADDRESSES = 4 * GRAMMAR_BOUNDS.heap
"""Address space that a child may add. The heap grows in large parts."""
_STATM = Path("/proc/self/statm")
_UNBOUNDED = "The grammar is not valid: compiling it takes too much time or memory; send a simpler one."


class Checked(NamedTuple):
    """The answer of a child about one grammar."""

    problem: str
    """Why the grammar cannot be followed, as a sentence; empty if it can."""
    heap: int = 0
    """Memory of the compiled grammar in bytes."""


class Checker:
    """Starts the process for an engine and asks it. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._source = vocabulary.tokens, vocabulary.controls, list(vocabulary.eos_token_ids)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Checker] | None = None
        """Ends the process, at the latest when nothing refers to this object any more."""

    def start(self) -> None:
        """Start the process, if it does not run. It loads the vocabulary while the caller goes on."""
        with self._lock:
            if self._control is None:
                self._start()

    def check(self, grammar: str) -> Checked:
        """Compile ``grammar`` in a child and return what it found."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(theirs)
            try:
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
                with ours.makefile("rb") as answer:
                    return msgspec.msgpack.decode(answer.read(), type=Checked)
            except (OSError, msgspec.DecodeError):  # the child was ended
                return Checked(_UNBOUNDED)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
            self._control = self._process = self._end = None

    def _send(self, connection: socket.socket) -> None:
        """Give the process a connection, on which a child answers."""
        with self._lock:
            for _ in range(2):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"c"], [connection.fileno()])
                except OSError:  # the process ended, for example for lack of memory
                    self._stop()
                else:
                    return

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(place for place in sys.path if place)
        # The heap of this process returns memory, and has small pages, of which children copy few.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - runs at start and after a crash
                [sys.executable, "-m", "yardstick_llm.engine.structured.checker", str(theirs.fileno())],
                env=inherited | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        self._end = weakref.finalize(self, _end, self._process, self._control)
        source, pipe = msgspec.msgpack.encode(self._source), self._process.stdin
        assert pipe is not None

        def write() -> None:
            try:
                with pipe:
                    pipe.write(source)
            except OSError:  # the process ended
                pass

        threading.Thread(target=write, daemon=True).start()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _serve(control: socket.socket, vocabulary: LLTokenizer) -> None:
    """Fork a child for each connection until the engine closes ``control``."""
    while True:
        data, files, _flags, _address = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if not os.fork():
            try:
                control.close()
                _answer(socket.socket(fileno=files[0]), vocabulary)
            finally:
                os._exit(0)
        os.close(files[0])


def _answer(connection: socket.socket, vocabulary: LLTokenizer) -> None:
    os.nice(NICE)
    signal.setitimer(signal.ITIMER_PROF, GRAMMAR_BOUNDS.seconds)
    _bound(resource.RLIMIT_STACK, STACK_BYTES)
    if _STATM.exists():
        _bound(resource.RLIMIT_AS, int(_STATM.read_text().split()[0]) * resource.getpagesize() + _ADDRESSES)
    with connection.makefile("rb") as file:
        grammar = file.read().decode()
    before = _allocated()
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    checked = Checked("", LEAST_BYTES + len(grammar) + _allocated() - before)
    if matcher.is_error():
        checked = Checked(f"The grammar is not valid: {reason_of(matcher)}.")
    elif checked.heap > GRAMMAR_BOUNDS.heap:
        checked = Checked(_UNBOUNDED)
    connection.sendall(msgspec.msgpack.encode(checked))


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", "o", "s", "h", "mapped", "u", "f", "used", "free", "keep"))


def _allocated() -> int:
    """Bytes of this process's heap that are in use; without glibc its resident memory, which also has other parts."""
    if _LIBC is None:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = _LIBC.mallinfo2()
    return int(found.used + found.mapped)


def _bound(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def reason_of(matcher: LLMatcher) -> str:
    """The first line of a matcher's error."""
    return matcher.get_error().partition("\n")[0].strip().rstrip(".")[:500]


_LIBC = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "mallinfo2") else None
if _LIBC is not None:
    _LIBC.mallinfo2.restype = _MallInfo


def main() -> None:
    """Load the vocabulary from standard input and serve the socket whose file descriptor is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children that have ended
    source = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[list[bytes], list[int], list[int]])
    vocabulary = without_tokenizer(*source)
    del source
    gc.collect()
    gc.freeze()  # prevents collections in children from copying these pages
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _serve(control, vocabulary)


if __name__ == "__main__":
    main()
