"""Worker processes of pytest-xdist that are forks of one process, which has imported all test modules.

Importing them takes a worker longer than anything else that all workers do, and in a fresh clone each would also rewrite their
assertions. The process that distributes the tests forks one process that collects them (:func:`enable`), and
:mod:`subprocess` asks that one for workers (:mod:`tests.warm`). A worker collects again, so that errors are reported as always.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from execnet.gateway_io import popen_bootstrapline

from tests import warm

COMMAND = [sys.executable, "-u", "-c", popen_bootstrapline]
"""How execnet starts a worker."""


def enable(config: pytest.Config) -> None:
    """Fork the workers of ``config``, which distributes tests, rather than start them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        with suppress(BaseException):
            _collect(config)
            warm.serve(theirs)
        os._exit(0)
    theirs.close()
    atexit.register(ours.close)
    warm.enable(warm.WarmProcess(ours, os.environ), {tuple(COMMAND): __name__})


class Failed:
    """Finds the files whose import may have failed. pytest leaves their modules in ``sys.modules``, where workers would find them
    without tests."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def pytest_exception_interact(self, node: pytest.Collector) -> None:
        self.files |= {str(node.path), *(str(folder / "__init__.py") for folder in node.path.parents)}


def _collect(config: pytest.Config) -> None:
    """Import the test modules that ``config`` selects. Errors are left to the workers, which meet them again."""
    silent = os.open(os.devnull, os.O_RDWR)
    for place in range(2):
        os.dup2(silent, place)
    arguments = [*config.invocation_params.args, "-n0", "--collect-only", "-qq", "-o", f"cache_dir={os.devnull}"]
    failed, before = Failed(), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # some modules encode texts, for which tokenizers would start threads
        pytest.main(arguments, [failed])
    for name in sys.modules.keys() - before:
        if getattr(sys.modules[name], "__file__", None) in failed.files:
            del sys.modules[name]
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        print("A test module starts threads when it is imported; the forked workers lack them.", file=sys.stderr)


if __name__ == "__main__":
    exec(eval(sys.stdin.readline()))  # as execnet's command does
