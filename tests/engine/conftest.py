"""Checkpoints that tests of several files read, and loops that they build. Nobody changes these files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.parity import make_model
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model that also embeds, by its last token."""
    return make_model(tmp_path_factory.mktemp("causal"), "qwen3", "causal last")


@pytest.fixture
def build(request: pytest.FixtureRequest, qwen3: Path) -> Iterator[Callable[..., Loop]]:
    """Builds the overlapped loop of :func:`qwen3` on one thread, unless a test asks for the plain one; all are closed."""
    made: list[Loop] = []

    def build(**settings: object) -> Loop:
        overlap = getattr(request, "param", True)
        defaults = {"model": str(qwen3), "max_total_tokens": 4096, "threads": 1, "overlap": overlap}
        made.append(build_loop(EngineSettings(name="test", **(defaults | settings))))
        return made[-1]

    yield build
    for loop in made:
        loop.close()
