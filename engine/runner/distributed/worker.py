"""A process of rank 1 or higher. It computes its part of each step that rank 0 announces.

Rank 0 starts it, or :mod:`engine.server.node` on another node, with an :class:`~engine.runner.distributed.group.Assignment` as JSON
in its argument. It exits when its standard input closes, even in the middle of a step, so that it cannot outlive the process that
started it.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.source import located
from yardstick_llm.engine.runner.attention.select import make_attention
from yardstick_llm.engine.runner.capturing import make_graphs
from yardstick_llm.engine.runner.distributed.group import READY, Assignment
from yardstick_llm.engine.runner.distributed.shard import (
    Allocate,
    ComputeStep,
    Join,
    Order,
    ShardedDecoder,
    group_fingerprint,
    join,
    load_part,
    part_format,
    read_orders,
)
from yardstick_llm.engine.runner.machine import device_of, dtype_of, set_threads
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels.runtime import prepare_loops

logger = logging.getLogger(__name__)

Orders = queue.SimpleQueue[Order]


def main(assignment_json: str) -> int:
    """Serve until rank 0 is gone; returns the exit code."""
    orders: Orders = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(orders,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 ends this process
    assignment = msgspec.json.decode(assignment_json, type=Assignment)
    try:
        decoder = _load(assignment)
    except ModelError as error:
        print(error, flush=True)
        return 1
    print(READY, flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # from here on, nothing reads stdout, and libraries may print
    assert isinstance(orders.get(), Join)
    join(assignment.rank, assignment.settings, assignment.port, decoder.embed.weight.device)
    _serve(decoder, orders, assignment.settings)
    return 0


def _load(assignment: Assignment) -> ShardedDecoder:
    settings = located(assignment.settings)
    set_threads(settings)
    directory = Path(settings.model)
    device = device_of(settings, assignment.rank)
    dtype = dtype_of(settings, device)
    config = load_config(directory, settings.max_context)
    decoder = ShardedDecoder(config, dtype, assignment.rank, settings.tensor_parallel, settings.expert_parallel)
    if assignment.fingerprint and group_fingerprint(directory, dtype, settings, decoder.config) != assignment.fingerprint:
        raise ModelError("The files of the model are not those of node 0; give all nodes the same --model and --revision.")
    load_part(decoder, directory, part_format(settings, device, dtype), device)
    decoder = decoder.to(device)
    prepare_loops(decoder.embed.weight)
    return decoder


@torch.inference_mode()
def _serve(decoder: ShardedDecoder, orders: Orders, settings: EngineSettings) -> None:
    first = orders.get()
    assert isinstance(first, Allocate)
    attention = make_attention(decoder, first.slots, settings.attention, settings.kv_dtype)
    wanted = "auto" if first.captured else "off"  # where they must be and cannot, rank 0 says so
    graphs = make_graphs(decoder, attention, wanted, first.captured)
    gc.collect()
    gc.freeze()
    while isinstance(step := orders.get(), ComputeStep):
        segments = step.unpack()
        received = torch.empty(
            sum(len(segment.tokens) for segment in segments), dtype=torch.int64, device=decoder.embed.weight.device
        )
        for captured in graphs:
            if captured.forward(received, received, segments, received[:0]) is not None:
                break
        else:
            decoder(received, received, attention.plan(segments))


def _receive(orders: Orders) -> None:
    with open(0, "rb", closefd=False) as file:  # sys.stdin's lock would block the interpreter's exit
        for order in read_orders(file):
            orders.put(order)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        exit_code = main(*sys.argv[1:])
    except Exception:
        logger.exception("a process of the model failed")
        exit_code = 1
    os._exit(exit_code)  # a process group without one of its processes can block the interpreter's exit
