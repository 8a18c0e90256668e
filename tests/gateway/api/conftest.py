"""A Redis for catalogues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis import RedisServer


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server
