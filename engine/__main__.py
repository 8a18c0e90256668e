"""``python -m engine``: serve one model. Errors at the start are one line on standard error and exit code 1."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from litestar import Litestar

from engine.serving.app import create_app, create_health_app
from engine.serving.bearer import BearerTokenError, BearerTokens
from engine.serving.loop_client import LoopClient
from engine.settings import ATTENTION, CUDA_GRAPHS, DEVICES, DTYPES, QUANTIZE, EngineSettings

FLUSH_SECONDS = 2
"""Time for the last bytes to be sent, once every request has its last word."""


def main() -> int:
    """Serve until told to stop; returns the exit code."""
    arguments = _parser().parse_args()
    settings = EngineSettings(
        model=arguments.model,
        name=arguments.name or Path(arguments.model).name,
        length_model=arguments.length_model,
        length_gamma=arguments.length_gamma,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        attention=arguments.attention,
        cuda_graphs=arguments.cuda_graphs,
        max_total_tokens=arguments.max_total_tokens,
        max_batched_tokens=arguments.max_batched_tokens,
        max_running_requests=arguments.max_running_requests,
        max_waiting=arguments.max_waiting,
        max_wait_seconds=arguments.max_wait_seconds,
        stall_seconds=arguments.stall_seconds,
        threads=arguments.threads,
        tensor_parallel=arguments.tensor_parallel,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        token = BearerTokens(arguments.token_file) if arguments.token_file else None
        listener = _listen(arguments.host, arguments.port, "--port")
        health = _listen(arguments.host, arguments.health_port, "--health-port") if arguments.health_port else None
    except (BearerTokenError, OSError) as error:
        return _fail(str(error))
    return asyncio.run(_serve(create_app(settings, token), listener, health, arguments.grace_seconds))


async def _serve(app: Litestar, listener: socket.socket, health: socket.socket | None, grace_seconds: float) -> int:
    """Serve until a signal comes or the loop ends. After a signal, running requests have ``grace_seconds`` to end."""
    link: LoopClient = app.state.link
    servers = [(_Server(_config(app)), listener)]
    if health is not None:
        servers.append((_Server(_config(create_health_app(link))), health))
    serving = asyncio.create_task(_serve_all(servers))
    told, ended = asyncio.create_task(_told_to_end()), asyncio.create_task(link.ended.wait())
    await asyncio.wait({serving, told, ended}, return_when=asyncio.FIRST_COMPLETED)
    failure = link.failure if ended.done() else None
    if told.done():
        await link.drain(grace_seconds)
    for server, _ in servers:
        server.should_exit = True
    for task in (told, ended):
        task.cancel()
    await serving
    return 0 if failure is None else _fail(failure)


async def _serve_all(servers: Sequence[tuple[uvicorn.Server, socket.socket]]) -> None:
    await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in servers))


class _Server(uvicorn.Server):
    """Leaves signals to :func:`_serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Litestar) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=FLUSH_SECONDS)


async def _told_to_end() -> None:
    """Return at SIGTERM or SIGINT; from then on another one ends the process at once."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await told.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


def _listen(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket. Raises OSError with a line that names the remedy."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with {flag}.") from None
    return listener


def _fail(message: str) -> int:
    print(f"engine: {message}", file=sys.stderr)
    return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must be greater than 0 and less than 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m engine", description="Serve one model to Yardstick gateways.")
    parser.add_argument("--model", required=True, help="a model directory, or a hub id such as Qwen/Qwen3-0.6B")
    parser.add_argument("--name", help="what clients call the model (the last part of --model)")
    parser.add_argument("--length-model", help="a length-value model for guided generations: a directory, or a hub id")
    parser.add_argument("--length-gamma", type=_share, help="its gamma (what length_value.json beside it says, or else 0.997)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="port to listen on (%(default)s)")
    parser.add_argument("--health-port", type=int, help="a second port, with health and metrics only")
    parser.add_argument("--token-file", type=Path, help="file of tokens, one a line; gateways send one of them")
    parser.add_argument(
        "--grace-seconds", type=float, default=30, help="time that requests have to end after SIGTERM (%(default)s)"
    )
    parser.add_argument("--device", choices=DEVICES, help="where the model computes (a GPU where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights, keys and values (bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--quantize", choices=QUANTIZE, help="compute the layers' matrix products in 8 bits (not)")
    parser.add_argument("--attention", choices=ATTENTION, default="auto", help="the attention backend (%(default)s)")
    parser.add_argument(
        "--cuda-graphs", choices=CUDA_GRAPHS, default="auto", help="capture small steps and replay them (%(default)s)"
    )
    parser.add_argument("--max-total-tokens", type=_positive, help="tokens whose keys and values are kept (what memory allows)")
    parser.add_argument("--max-batched-tokens", type=_positive, help="tokens computed in one step (2048 on a CPU, 8192 on a GPU)")
    parser.add_argument("--max-running-requests", type=_positive, default=256, help="requests worked on at once (%(default)s)")
    parser.add_argument("--max-waiting", type=_positive, default=4096, help="requests queued before refusal (%(default)s)")
    parser.add_argument(
        "--max-wait-seconds", type=float, default=30, help="time that a request may have to be queued before refusal (%(default)s)"
    )
    parser.add_argument(
        "--stall-seconds", type=_seconds, default=120, help="time that a step may take before the engine is not ready (%(default)s)"
    )
    parser.add_argument("--threads", type=_positive, help="CPU threads of the model (one a core)")
    parser.add_argument("--tensor-parallel", type=_positive, default=1, help="processes that share the model (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
