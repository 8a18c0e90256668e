"""Gateways as processes of their own, before fake engines that a test controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes import FakeEngine, served
from tests.processes import Program
from tests.tuned import environment

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
    """A function that starts a gateway before ``engine`` with these settings and constants, and waits for it."""
    with ExitStack() as stack:

        def start(**settings: object) -> Program:
            return stack.enter_context(Program("tests.tuned", "--engine", engine.url, **environment(settings))).wait_ready()

        yield start
