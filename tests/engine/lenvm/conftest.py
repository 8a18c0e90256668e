"""A pair of models that tests of several files read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.lenvm.plain import Plain
from tests.engine.lenvm.writing import make_pair


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen2+qwen3")


@pytest.fixture(scope="session")
def plain(checkpoints: tuple[Path, Path]) -> Plain:
    return Plain(*checkpoints)
