"""A gateway before fake engines, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, Running, stop
from tests.processes import wait_until
from tests.redis import RedisServer
from tests.tuned import split, tuned
from yardstick_llm.gateway.app import create_app
from yardstick_llm.gateway.settings import Settings

Start = Callable[..., httpx.Client]


class Clock:
    """Stands for the module ``time`` in a module whose clock a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@contextmanager
def gateways() -> Iterator[Start]:
    """A function that starts a gateway before the engines given, waits until it is ready and finds its Redis, and returns a client
    of it."""
    servers: list[Running] = []
    with ExitStack() as stack:
        stack.callback(stop, servers)

        def serve(app: Callable[..., Any], http: Any = "auto") -> str:
            servers.append(Running(app, http=http))
            return servers[-1].url

        def start_gateway(*engines: FakeEngine, wait: bool = True, finds_redis: bool = True, **settings: Any) -> httpx.Client:
            for engine in engines:
                engine.url = serve(engine)
            quick = {"probe_seconds": 0.05, "wait_seconds": 0.1, "silence_seconds": 10}  # fakes compute on their event loops
            options = quick | {"engines": tuple(engine.url for engine in engines)} | settings
            chosen, constants = split(options)
            with tuned(constants):
                app = create_app(Settings(**chosen))
            client = stack.enter_context(httpx.Client(base_url=serve(app, app.protocol), timeout=60))
            if wait and engines:
                # /readyz answers in a fifth of the time that /metrics takes.
                wait_until(lambda: client.get("/readyz").is_success, 60, pause=0.03)  # the first one also starts a fork server
                wait_until(lambda: metric(client, "yardstick_engines_ready") == len(engines), 60, pause=0.03)
            if wait and finds_redis and "redis_url" in settings:
                wait_until(lambda: metric(client, "yardstick_redis_available") == 1)
            return client

        yield start_gateway


@pytest.fixture
def start() -> Iterator[Start]:
    with gateways() as start_gateway:
        yield start_gateway


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx.Client]:
    """A client of a gateway before an engine that no test changes."""
    with gateways() as start_gateway:
        yield start_gateway(FakeEngine())


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def fields_of_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The module's ``ENGINE``: fields of the engine of its tests."""
    found: dict[str, Any] = getattr(request.module, "ENGINE", {})
    return found


@pytest.fixture(scope="module")
def pair(fields_of_engine: dict[str, Any]) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """An engine that tests change, and a client of the gateway before it."""
    engine = FakeEngine(**fields_of_engine)
    with gateways() as start_gateway:
        yield engine, start_gateway(engine)


@pytest.fixture
def engine(pair: tuple[FakeEngine, httpx.Client], fields_of_engine: dict[str, Any]) -> FakeEngine:
    """The engine of the module, as new: no faults, nothing asked."""
    engine, _ = pair
    wait_until(lambda: not engine.running)
    new = FakeEngine(url=engine.url, **fields_of_engine)
    for attribute in fields(engine):
        setattr(engine, attribute.name, getattr(new, attribute.name))
    return engine


@pytest.fixture
def client(pair: tuple[FakeEngine, httpx.Client], engine: FakeEngine) -> httpx.Client:
    """A client of the gateway before ``engine``. Its cache and its metrics are those of the module."""
    return pair[1]


async def closed(link: Any) -> Any:
    """``link``, once it has found its Redis."""
    link.start()
    async with asyncio.timeout(10):
        while link.is_open:  # noqa: ASYNC110 - the link has no event for it, as nobody else waits
            await asyncio.sleep(0.01)
    return link


def metric(client: httpx.Client, name: str) -> float:
    """The value of a metric, named with its labels as in the exposition; 0 where it has none yet."""
    return metrics(client, name)[0]


def metrics(client: httpx.Client, *names: str) -> list[float]:
    """The values of several metrics at one moment."""
    values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
    return [float(values.get(name, 0)) for name in names]
