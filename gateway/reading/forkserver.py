"""``python -m gateway.reading.forkserver``: holds the tokenisers in memory and forks worker processes that share them.

Reading a large ``tokenizer.json`` takes seconds, so the replacement of a killed worker must not read it again: a fork takes
milliseconds and shares the memory. This process handles no request. It has one thread, as forking requires.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from engine.wire import TokenizerFiles
from gateway.presets.preset import PresetError, parse_preset
from gateway.reading.endpoint import TextSide
from gateway.reading.worker import die_with_parent, run
from gateway.text.chat_template import ChatTemplate
from gateway.text.preset_template import PresetTemplate
from gateway.text.spelling import TokenizerError
from gateway.text.tokenizer import Tokenizer
from gateway.workers.messages import HEADER, Ended, Forget, Fork, Forked, Load, Loaded, Order, Report, frame

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
        template = ChatTemplate(files.chat_template, files.special_tokens)
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
