"""``python -m gateway``: the gateway as a process of its own."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import uvicorn

from gateway.app import create_app
from gateway.heap import return_freed_memory
from gateway.http import Protocol
from gateway.lifecycle import Lifecycle
from gateway.settings import Settings, SettingsError, load_settings

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the process's exit status: 1, after one line on stderr, where it cannot start."""
    parser = argparse.ArgumentParser(prog="gateway", description="Serve the OpenAI-compatible API in front of engines.")
    parser.add_argument(
        "--engine",
        action="append",
        dest="engines",
        metavar="URL",
        help="http://, dns:// or kubernetes:// and a host and port; repeat for more",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", help="TCP port to listen on (8000); 0 takes a free one")
    parser.add_argument("--api-keys-file", metavar="FILE", help="JSON file of the API keys' hashes")
    parser.add_argument("--redis-url", metavar="URL", help="Redis for results and limits, such as redis://127.0.0.1:6379/0")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every call of the Kubernetes API
    try:
        settings = load_settings(os.environ, vars(parser.parse_args(arguments)))
        return serve(settings)
    except SettingsError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1


def serve(settings: Settings) -> int:
    """Serve with ``settings``; returns the exit status. Raises :class:`SettingsError`."""
    return_freed_memory()
    lifecycle = Lifecycle()
    config = uvicorn.Config(
        create_app(settings, lifecycle=lifecycle),
        loop="uvloop",
        http=Protocol,
        proxy_headers=False,  # nobody asks where a client is
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.grace_seconds - settings.drain_seconds)),
    )
    server = _Server(config, lifecycle, settings.drain_seconds)
    with bind(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        logger.info("listening at http://%s:%s", f"[{host}]" if ":" in host else host, port)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly end
            server.run(sockets=[listener])
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """Between SIGTERM and its end it is not ready and serves on for a while; SIGINT, or a second signal, skips that while."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, drain_seconds: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_seconds = drain_seconds
        self._leave_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve. What is in memory by then stays: no later search for garbage goes through it, which takes 50 ms."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if sig == signal.SIGTERM and not self._lifecycle.draining:
            self._lifecycle.draining = True
            self._leave_at = time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; called ten times a second."""
        if self._leave_at is not None and time.monotonic() >= self._leave_at:
            self.should_exit = True
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises :class:`SettingsError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        raise SettingsError(f"cannot listen on port {port} of {host}: {reason}; choose another with --port or --host") from None


if __name__ == "__main__":
    sys.exit(main())
