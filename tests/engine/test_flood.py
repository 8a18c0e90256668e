"""A flood of requests against a real engine, and what another tenant notices of it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Self

import aiohttp
import msgspec
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import Pod
from yardstick_llm.engine import wire

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

MODEL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
ROUNDS, REQUESTS = 5, 10
"""Each measurement is cut into rounds that alternate with those of the other, because other programs share the machine."""


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """On one of two cores, so that what asks it has the other."""
    model = make_checkpoint(tmp_path_factory.mktemp("slow"), "qwen3", **MODEL)
    pod = Pod(model, "--name", "slow", "--threads", "1", "--max-wait-seconds", "1000")
    yield pod.wait_ready()
    pod.close()


class Client(threading.Thread):
    """A tenant that keeps ``at_once`` score requests open until it is stopped."""

    def __init__(self, pod: Pod, tenant: str, at_once: int, *, items: int, pause: float = 0.0) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.errors: list[object] = []
        self._url = f"{pod.url}/score"
        self._caller = wire.Caller(tenant=tenant)
        self._at_once, self._items, self._pause = at_once, items, pause
        self._random = random.Random()
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections, so that the engine drops what is open."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            asking = [asyncio.create_task(self._ask(session)) for _ in range(self._at_once)]
            stopping = asyncio.create_task(asyncio.to_thread(self._stopping.wait))
            done, _ = await asyncio.wait([*asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            self.errors += [task.exception() for task in done if task is not stopping]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            self._stopping.set()
            await stopping

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0, self._pause))
            body = wire.encode(self._message())
            began = time.monotonic()
            async with session.post(self._url, data=body) as response:
                reply = msgspec.msgpack.decode(await response.read(), type=wire.Reply)
            self.seconds.append(time.monotonic() - began)
            if isinstance(reply, wire.Failed):
                self.errors.append(reply)

    def _message(self) -> wire.Score:
        query = [self._random.randrange(3, 300) for _ in range(20)]
        name = f"{self._caller.tenant} {self._random.getrandbits(64)}"
        items = [[self._random.randrange(3, 300)] * 30 for _ in range(self._items)]
        return wire.Score(name, query, items, wire.Labels([1]), caller=self._caller)


def measure(pod: Pod, *floods: int) -> list[float]:
    """P99 in seconds of a tenant with one request at a time, beside another with each of these numbers of requests at a time."""
    seconds: list[list[float]] = [[] for _ in floods]
    for _ in range(ROUNDS):
        for place, at_once in enumerate(floods):
            with Client(pod, "flood", at_once, items=20) as flood, Client(pod, "quiet", 1, items=10, pause=0.1) as quiet:
                while len(quiet.seconds) < REQUESTS + 3:
                    assert not quiet.errors + flood.errors
                    assert quiet.is_alive()
                    time.sleep(0.01)
            seconds[place] += quiet.seconds[3:]
    return [float(np.percentile(each, 99)) for each in seconds]


def test_a_flood_raises_the_p99_of_others_by_a_fifth_at_most(pod: Pod) -> None:
    busy, flooded = measure(pod, 3, 256)
    print(f"\nP99 beside 3 requests {busy:.3f} s, beside 256 {flooded:.3f} s: {flooded / busy:.2f}")
    assert flooded <= 1.2 * busy
