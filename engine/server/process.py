"""The engine's HTTP server as a process. Errors at the start are one line on standard error and exit code 1."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from litestar import Litestar

from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner.distributed.group import DRAIN_SIGNAL, check_group
from yardstick_llm.engine.server.app import BearerTokenError, BearerTokens, Protocol, create_app, create_health_app, create_node_app
from yardstick_llm.engine.server.loop_client import LoopClient
from yardstick_llm.engine.server.node import Node
from yardstick_llm.engine.server.options import parse
from yardstick_llm.engine.settings import ServerSettings
from yardstick_llm.tracing.export import Exporter, TracingError
from yardstick_llm.tracing.setup import check_endpoint, open_exporter

INTERRUPTED = 130
"""Exit status if Ctrl-C comes before the engine serves."""
FLUSH_SECONDS = 2
"""Time for the last bytes to be sent, once every request has its last word."""


def main() -> int:
    """Serve until a signal comes; returns the exit code."""
    settings, server = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = msgspec.structs.replace(settings, dist_token_file=server.token_file)
    try:
        check_group(settings)
        token = BearerTokens(Path(server.token_file)) if server.token_file else None
        listener = _listen(server.host, server.port, "--port")
        health = _listen(server.host, server.health_port, "--health-port") if server.health_port else None
        exporter = _exporter(server)
    except (BearerTokenError, ModelError, OSError, TracingError) as error:
        return _fail(str(error))
    app = create_node_app(Node(settings)) if settings.node_rank else create_app(settings, token, exporter)
    return uvloop.run(_serve(app, listener, health, server.grace_seconds))


async def _serve(app: Litestar, listener: socket.socket, health: socket.socket | None, grace_seconds: float) -> int:
    """Serve until a signal comes or the loop ends. After a signal, running requests have ``grace_seconds`` to end."""
    client: LoopClient | Node = app.state.client
    servers = [(_Server(_config(app)), listener)]
    if health is not None:
        servers.append((_Server(_config(create_health_app(client, app.state.tracing))), health))
    serving = asyncio.create_task(_serve_all(servers))
    stopping, ended = asyncio.create_task(_stop_signal()), asyncio.create_task(client.ended.wait())
    await asyncio.wait({serving, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
    failure = client.failure if ended.done() else None
    interrupted = stopping.done() and stopping.result() == signal.SIGINT and client.ready is None
    if stopping.done():
        await client.drain(grace_seconds)
    for server, _ in servers:
        server.should_exit = True
    for task in (stopping, ended):
        task.cancel()
    await serving
    if interrupted:
        return INTERRUPTED
    return 0 if failure is None else _fail(failure)


async def _serve_all(servers: Sequence[tuple[uvicorn.Server, socket.socket]]) -> None:
    await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in servers))


class _Server(uvicorn.Server):
    """Leaves signals to :func:`_serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Litestar) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Protocol,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # no code uses the client's address
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


async def _stop_signal() -> int:
    """Return SIGTERM or SIGINT when it comes; from then on another one ends the process at once. Or the signal of another node's
    end."""
    stopping, came, loop = asyncio.Event(), list[int](), asyncio.get_running_loop()

    def stop(number: int) -> None:
        came.append(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, DRAIN_SIGNAL):
        loop.add_signal_handler(number, stop, number)
    await stopping.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    return came[0]


def _exporter(server: ServerSettings) -> Exporter | None:
    """The exporter of traces; None if tracing is off. Raises :class:`TracingError`."""
    if server.tracing_endpoint is not None:
        try:
            check_endpoint(server.tracing_endpoint)
        except TracingError as error:
            raise TracingError(f"--tracing-endpoint is not the URL of a collector; {error}") from None
    return open_exporter(server.tracing_endpoint, server.tracing_service, default_service="yardstick-engine")


def _listen(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket. ``*`` means all addresses, of IPv4 and of IPv6 where there is one. Raises OSError with a line that names the
    remedy.
    """
    dual = host == "*" and socket.has_dualstack_ipv6()
    address = ("::" if dual else "0.0.0.0") if host == "*" else host  # noqa: S104  the operator asks for all addresses
    # asyncio sets TCP_NODELAY on accepted sockets that name their protocol. Without it, the body of an answer, or a token, waits
    # for the acknowledgement of what was sent before, which Linux delays by 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with {flag}.") from None
    return listener


def _fail(message: str) -> int:
    print(f"engine: {message}", file=sys.stderr)
    return 1
