"""Fake engines on real sockets, and the gateway's side of them, for tests of hedges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from engine import wire
from gateway.ops.metrics import Telemetry
from gateway.pool import pace
from gateway.pool.client import Connections, EngineClient
from gateway.pool.dispatch import Dispatcher
from gateway.pool.health import Health
from gateway.pool.hedging import Hedge
from gateway.pool.pace import size_class
from gateway.pool.replica import Replica, ServedModel
from tests.fakes import FakeEngine, Faults, Running, logprobs_after, stop
from tests.processes import until

MESSAGE = wire.Score("", [1] * 30, [[2], [3]], wire.Labels([4, 5]))
TOKENS = 32
SIZE = size_class(MESSAGE, TOKENS)


@dataclass
class Fleet:
    """Fake engines on real sockets, and the gateway's side of them."""

    engines: list[FakeEngine]
    model: ServedModel
    telemetry: Telemetry
    dispatcher: Dispatcher

    @property
    def replicas(self) -> list[Replica]:
        return self.model.replicas

    async def score(self) -> wire.Scored:
        """Score :data:`MESSAGE`, first on the first replica."""

        async def ask(client: EngineClient) -> wire.Scored:
            return await client.score(MESSAGE)

        return await self.dispatcher.call(self.model, ask, tokens=TOKENS, preferred=self.replicas[0], hedge=Hedge(SIZE, ask))

    async def race(self) -> asyncio.Task[wire.Scored]:
        """Return a request that two replicas hold."""
        for engine in self.engines:
            engine.faults.hold = True
        asking = asyncio.create_task(self.score())
        await until(lambda: self.engines[0].running and self.engines[1].running)
        return asking

    def counts(self) -> dict[str, float]:
        """Metrics of hedges that are not zero, by their last label."""
        lines = b"".join(self.telemetry.exposition()).decode().splitlines()
        return {line.split('"')[-2]: float(line.split()[-1]) for line in lines if line.startswith("yardstick_hedges")}

    def is_idle(self) -> bool:
        """Whether no request is counted or computed anywhere."""
        counted = any(replica.in_flight or replica.tokens or replica._waits for replica in self.replicas)
        return not counted and not self.model.hedges.running and not any(engine.running for engine in self.engines)


SERVERS: list[tuple[FakeEngine, Running]] = []


@contextmanager
def served_fleet() -> Iterator[None]:
    """Serve four engines, which :func:`fleet` makes as new."""
    for _ in range(4):
        engine = FakeEngine()
        SERVERS.append((engine, Running(engine)))
    yield
    stop([server for _, server in SERVERS])
    SERVERS.clear()


@asynccontextmanager
async def fleet(count: int = 2, *, budget: float = 10_000, seconds: float = 0.01) -> AsyncIterator[Fleet]:
    """Replicas that are known to answer in ``seconds``."""
    engines, telemetry, connections = [engine for engine, _ in SERVERS[:count]], Telemetry(), Connections()
    clients = [EngineClient(server.url, connections, connect_seconds=2, engine_seconds=20) for _, server in SERVERS[:count]]
    replicas = [Replica(client, ready=True, health=Health(seconds=60)) for client in clients]
    for replica in replicas:
        for _ in range(pace.MIN_ANSWERS):
            replica.pace.add(SIZE, seconds)
    model = ServedModel(engines[0].info(), None, "", replicas)
    model.hedges.tokens = budget
    dispatcher = Dispatcher(telemetry, wait_seconds=0, max_waiting=0, hedge_budget=0.02)
    try:
        yield Fleet(engines, model, telemetry, dispatcher)
    finally:
        for engine in engines:
            engine.faults.hold = engine.silent = False
        await connections.close()
        await until(lambda: not any(engine.running for engine in engines))
        for engine in engines:
            vars(engine).update(vars(FakeEngine()))


def let_fail(faults: Faults, *, garbage: bool = False) -> None:
    """End a request that an engine holds."""
    faults.garbage, faults.break_after = garbage, None if garbage else 0
    faults.hold = False


def row(engine: FakeEngine, prompt: list[int]) -> list[float]:
    return [logprobs_after(prompt, engine.vocab_size)[label] for label in (4, 5)]


def rows(engine: FakeEngine) -> list[list[float]]:
    return [row(engine, MESSAGE.prefix + branch) for branch in MESSAGE.branches]
