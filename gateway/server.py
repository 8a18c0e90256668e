"""The gateway as a process: its command line, its listening socket and its end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn

from yardstick_llm.gateway.app import create_app
from yardstick_llm.gateway.http import connection
from yardstick_llm.gateway.ops.access_log import LineWriter, LogHandler
from yardstick_llm.gateway.process.event_loop import GarbageCollection, return_freed_memory
from yardstick_llm.gateway.process.signals import Lifecycle
from yardstick_llm.gateway.settings import FLAGS, LISTS, Settings, SettingsError, load_settings

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 1.0
"""Part of the grace period in which errors are sent to the clients of requests that did not finish."""
_SEND_BUFFER = 256 * 1024
"""Size of the kernel's send buffer of a connection. By default it grows to megabytes for a client that does not read."""
_OTHER_FILES = 2048
"""Open files other than connections of clients, mainly connections to engines and Redis."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status: 1, after one line on stderr, if the gateway cannot start."""
    try:
        settings = load_settings(os.environ, vars(_parser().parse_args(arguments)))
        with LineWriter(sys.stderr.fileno()) as log:
            format = "%(asctime)s %(levelname)s %(name)s: %(message)s"
            logging.basicConfig(level=logging.INFO, format=format, handlers=[LogHandler(log)], force=True)
            return serve(settings, log)
    except SettingsError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, which has the settings that are named most often."""
    parser = argparse.ArgumentParser(prog="gateway", description="Serve the OpenAI-compatible API in front of engines.")
    for setting, (metavar, help) in _OPTIONS.items():
        if setting in LISTS:
            parser.add_argument(FLAGS[setting], action="append", dest=setting, metavar=metavar, help=f"{help}; repeat for more")
        else:
            parser.add_argument(FLAGS[setting], dest=setting, metavar=metavar, help=help)
    return parser


_OPTIONS = {
    "engines": ("URL", "http://, dns:// or kubernetes:// and a host and port"),
    "host": ("HOST", "address to listen on (127.0.0.1)"),
    "port": ("PORT", "TCP port to listen on (8000); 0 takes a free one"),
    "api_keys_file": ("FILE", "JSON file of the API keys' hashes"),
    "presets": ("MODEL=PRESET", "how a model is prompted and read: a name from `yardstick presets` or a .toml file"),
    "tool_parsers": ("MODEL=FORMAT", "how a model calls tools, where its chat template does not show it, such as hermes"),
    "reasoning_parsers": (
        "MODEL=FORMAT",
        "how a model marks its thinking, where its chat template does not show it, such as think",
    ),
    "aliases": ("ALIAS=MODEL", "a further name of a model"),
    "fallbacks": ("MODEL=FALLBACK", "the model that generates while MODEL has no ready engine"),
    "image_hosts": ("HOST", "a host that images may be fetched from"),
    "redis_url": ("URL", "Redis for results and limits, such as redis://127.0.0.1:6379/0"),
}
"""Placeholder and description of each option, by setting."""


def serve(settings: Settings, log: LineWriter) -> int:
    """Serve with ``settings`` and return the exit status. Raises :class:`SettingsError`."""
    return_freed_memory()
    lifecycle = Lifecycle()
    serve_on_seconds = max(1.0, settings.grace_seconds - settings.drain_seconds)
    app = create_app(settings, lifecycle=lifecycle, log=log)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=app.protocol,  # type: ignore[arg-type]
        proxy_headers=False,  # no code uses the client's address from proxies
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=round(serve_on_seconds),
    )
    last_words_seconds = min(LAST_WORDS_SECONDS, serve_on_seconds / 2)
    server = _Server(
        config, lifecycle, GarbageCollection(app.telemetry), settings.drain_seconds, serve_on_seconds - last_words_seconds
    )
    _raise_file_limit(settings.max_connections)
    with bind(settings.host, settings.port) as listener:
        bound_connections(listener)
        host, port = listener.getsockname()[:2]
        logger.info("listening at http://%s:%s", f"[{host}]" if ":" in host else host, port)
        try:
            server.run(sockets=[listener])
        except (KeyboardInterrupt, SystemExit):  # uvicorn raises a signal again after an orderly shutdown
            if not server.started:
                raise
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """uvicorn's server with a drain phase. After SIGTERM it is not ready but still serves for ``drain_seconds``; SIGINT, or a
    second signal, skips this phase.

    After it, open requests have ``serve_on_seconds`` to finish. Then they are cancelled and send an error to their clients, shortly
    before uvicorn closes their connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        garbage: GarbageCollection,
        drain_seconds: float,
        serve_on_seconds: float,
    ) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._garbage = garbage
        self._drain_seconds = drain_seconds
        self._serve_on_seconds = serve_on_seconds
        self._leave_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve."""
        await super().startup(sockets)
        self._garbage.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the drain phase at the first SIGTERM; otherwise end it."""
        if sig == signal.SIGTERM and not self._lifecycle.draining:
            self._lifecycle.draining = True
            self._leave_at = time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open requests finish, and cancel them at the end of the grace period."""
        ending = asyncio.get_running_loop().call_later(self._serve_on_seconds, self._end_requests)
        await super().shutdown(sockets)
        ending.cancel()

    def _end_requests(self) -> None:
        self._lifecycle.ended = True
        for task in self.server_state.tasks:
            task.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down. uvicorn calls this ten times per second."""
        self._garbage.tick()
        if self._leave_at is not None and time.monotonic() >= self._leave_at:
            self.should_exit = True
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; ``*`` means all addresses of IPv4 and, where there is one, IPv6. Raises :class:`SettingsError`."""
    dual = host == "*" and socket.has_dualstack_ipv6()
    address = ("::" if dual else "0.0.0.0") if host == "*" else host  # noqa: S104  the operator asks for all addresses
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048, dualstack_ipv6=dual)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        raise SettingsError(f"cannot listen on port {port} of {host}: {reason}; choose another with --port or --host") from None


def bound_connections(listener: socket.socket) -> None:
    """Let the kernel close connections whose peer has vanished, and limit its buffers. On Linux, accepted sockets inherit these
    options from ``listener``."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # the protocol closes connections of clients that do not read, except for the last bytes, which only the kernel holds
    options = {
        "TCP_KEEPIDLE": 30,
        "TCP_KEEPINTVL": 10,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": math.ceil(2000 * connection.WRITE_SECONDS),
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _raise_file_limit(connections: int) -> None:
    """Raise the limit on open files to what ``connections`` need, or as far as the system allows."""
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning("the limit of %d open files is too low for YARDSTICK_MAX_CONNECTIONS=%d; raise ulimit -n", hard, connections)
