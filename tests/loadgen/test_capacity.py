"""The processor time that the generator spends on a request: one core sends 2,000 requests a second."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import cast

import pytest
import uvloop

from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.client import Client
from yardstick_llm.loadgen.maker import Maker, Order
from yardstick_llm.loadgen.scenario import load

RATE, SECONDS, ITEMS = 500, 2, 10
TURNS_LIMIT = 9000
"""CPU time of a request, as turns of a loop, because machines differ by a factor of three. 4,100 to 6,300 were measured."""


class Stub(asyncio.Protocol):
    """A server in a process of its own that answers at once with one score list an item, so that what is measured is the client."""

    BODY = b'{"scores":[' + b",".join([b"[0.25,0.75]"] * ITEMS) + b'],"usage":{"prompt_tokens":3000,"total_tokens":3000}}'
    ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.waiting = b""

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        head, found, body = self.waiting.partition(b"\r\n\r\n")
        if found and len(body) >= (length := int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])):
            self.waiting = body[length:]
            self.transport.write(self.ANSWER)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def turn_seconds() -> float:
    """Processor time of one turn of a loop that adds squares; the least of some tries."""

    def loop() -> float:
        start, total = time.process_time(), 0
        for turn in range(200_000):
            total += turn * turn
        return time.process_time() - start

    return min(loop() for _ in range(5)) / 200_000


async def cpu_of_a_request(port: int) -> float:
    scenario = load(None, [f"target.url=http://127.0.0.1:{port}", f"arrivals.rate={RATE}", f"duration_s={SECONDS}"])
    client = Client(scenario, Share(), None)
    async with Maker(Order(scenario, Share())) as maker:
        cpu = time.process_time()
        client.start()
        await client.run(maker)
        cpu = time.process_time() - cpu
    assert all(record.failure is None for record in client.records)
    assert abs(len(client.records) - RATE * SECONDS) < 180
    return cpu / len(client.records)


@pytest.mark.alone
@pytest.mark.slow
def test_a_request_takes_little_time_of_a_core() -> None:
    """Requests of ten items of 180 tokens, Poisson. One of three tries counts."""
    command = [sys.executable, "-m", "tests.loadgen.test_capacity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        port = int(stub.stdout.readline())
        try:
            limit = TURNS_LIMIT * turn_seconds()
            assert any(uvloop.run(cpu_of_a_request(port)) <= limit for _ in range(3))
        finally:
            stub.kill()


if __name__ == "__main__":
    uvloop.run(serve())
