"""``python -m engine``: serve one model. Errors at the start are one line on standard error and exit code 1."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from pathlib import Path

import uvicorn
from litestar import Litestar

from engine.link import Link
from engine.server import create_app
from engine.settings import ATTENTION, CUDA_GRAPHS, DEVICES, DTYPES, QUANTIZE, EngineSettings


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
        max_tokens_in_cache=arguments.max_tokens_in_cache,
        token_budget=arguments.token_budget,
        max_running=arguments.max_running,
        max_waiting=arguments.max_waiting,
        threads=arguments.threads,
        tensor_parallel=arguments.tensor_parallel,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((arguments.host, arguments.port))
    except OSError as error:
        return _fail(f"cannot listen on {arguments.host} port {arguments.port}: {error.strerror}; choose another with --port.")
    return asyncio.run(_serve(create_app(settings), listener))


async def _serve(app: Litestar, listener: socket.socket) -> int:
    """Serve until a signal comes or the loop ends."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30))
    link: Link = app.state.link
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ended = asyncio.create_task(link.ended.wait())
    await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
    failure = None if serving.done() else link.failure
    server.should_exit = True
    await serving
    ended.cancel()
    return 0 if failure is None else _fail(failure)


def _fail(message: str) -> int:
    print(f"engine: {message}", file=sys.stderr)
    return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
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
    parser.add_argument("--device", choices=DEVICES, help="where the model computes (a GPU where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights, keys and values (bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--quantize", choices=QUANTIZE, help="compute the layers' matrix products in 8 bits (not)")
    parser.add_argument("--attention", choices=ATTENTION, default="auto", help="the attention backend (%(default)s)")
    parser.add_argument(
        "--cuda-graphs", choices=CUDA_GRAPHS, default="auto", help="capture small steps and replay them (%(default)s)"
    )
    parser.add_argument("--max-tokens-in-cache", type=_positive, help="tokens whose keys and values are kept (what memory allows)")
    parser.add_argument("--token-budget", type=_positive, help="tokens computed in one step (2048 on a CPU, 8192 on a GPU)")
    parser.add_argument("--max-running", type=_positive, default=256, help="requests worked on at once (%(default)s)")
    parser.add_argument("--max-waiting", type=_positive, default=4096, help="requests queued before refusal (%(default)s)")
    parser.add_argument("--threads", type=_positive, help="CPU threads of the model (one a core)")
    parser.add_argument("--tensor-parallel", type=_positive, default=1, help="processes that share the model (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
