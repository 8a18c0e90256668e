"""Gateways as processes of their own, before fake engines that a test controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fakes import FakeEngine, served
from tests.processes import Program

StartGateway = Callable[..., Program]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    """One for all tests of a module; a test leaves it as it found it."""
    engine = FakeEngine()
    with served(engine) as url:
        engine.url = url
        yield engine


@pytest.fixture(scope="module")
def start_gateway(engine: FakeEngine, as_in_production: None) -> Iterator[StartGateway]:
    """A function that starts a gateway before ``engine`` with settings as they stand in the environment, and waits for it."""
    programs: list[Program] = []

    def start(**settings: object) -> Program:
        environment = {f"YARDSTICK_{name.upper()}": str(value) for name, value in settings.items()}
        programs.append(Program("gateway", "--engine", engine.url, **environment))
        return programs[-1].wait_ready()

    yield start
    for program in programs:
        program.close()
