"""Fake engines on real sockets, and the gateway's side of them, for tests of hedges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from tests.fakes import FakeEngine, Faults, Running, logprobs_after, stop
from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import Stage
from yardstick_llm.gateway.pool.client import EngineClient
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.hedging import MIN_ANSWERS, Hedge, _Model, _SizeClass, size_class
from yardstick_llm.gateway.pool.replica import Health, Replica, ServedModel

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
    def hedges(self) -> _Model:
        assert self.dispatcher._hedger is not None
        return self.dispatcher._hedger._models[self.model]

    @property
    def replicas(self) -> list[Replica]:
        return self.model.replicas

    async def score(self) -> wire.Scored:
        """Score :data:`MESSAGE`, first on the first replica."""

        async def ask(replica: Replica, _: Stage | None) -> wire.Scored:
            return await replica.client.score(MESSAGE)

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

    def answered(self, size: int, seconds: float) -> None:
        """Let all replicas be known to answer requests of a size in ``seconds``."""
        known = self.hedges.sizes[size] = _SizeClass()
        assert self.dispatcher._hedger is not None
        for replica in self.replicas * MIN_ANSWERS:
            self.dispatcher._hedger._record(replica, known, seconds)

    def is_idle(self) -> bool:
        """Whether no request is counted or computed anywhere."""
        counted = any(replica.in_flight or replica.tokens or replica._waits for replica in self.replicas)
        return not counted and not self.hedges.running and not any(engine.running for engine in self.engines)


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
    engines, telemetry = [engine for engine, _ in SERVERS[:count]], Telemetry()
    clients = [EngineClient(server.url, connect_seconds=2, engine_seconds=20) for _, server in SERVERS[:count]]
    replicas = [Replica(client, ready=True, health=Health(seconds=60)) for client in clients]
    model = ServedModel(engines[0].info(), None, "", replicas)
    hedged = Fleet(engines, model, telemetry, Dispatcher(telemetry, wait_seconds=0, max_waiting=0, hedge_budget=0.02))
    assert hedged.dispatcher._hedger is not None
    hedged.dispatcher._hedger._models[model] = _Model(tokens=budget)
    hedged.answered(SIZE, seconds)
    try:
        yield hedged
    finally:
        for engine in engines:
            engine.faults.hold = engine.silent = False
        for client in clients:
            client.close()
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
