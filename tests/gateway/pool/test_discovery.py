"""Where engines are found: DNS."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from tests.processes import until
from yardstick_llm.gateway.pool.discovery import Endpoint, Source, resolved


async def test_names_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | None] = [None, ["10.0.0.2", "10.0.0.1", "fd00::1"], ["10.0.0.2"], None, ["10.0.0.2"], ["10.0.0.3"]]

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        if addresses is None:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    async with following(resolved("engines", 8100, resolve_seconds=0.01)) as seen:
        await until(lambda: len(seen) == 3)
    assert [[endpoint.url for endpoint in found] for found in seen] == [
        ["http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://[fd00::1]:8100"],
        ["http://10.0.0.2:8100"],
        ["http://10.0.0.3:8100"],
    ]


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[list[Sequence[Endpoint]]]:
    """Collect the endpoints that ``source`` yields, in a list that grows."""
    seen: list[Sequence[Endpoint]] = []

    async def follow() -> None:
        async with aclosing(source) as answers:
            async for found in answers:
                seen.append(found)

    task = asyncio.create_task(follow())
    try:
        yield seen
        assert not task.done(), "it gave up"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_the_client_of_kubernetes_is_imported_for_services_only() -> None:
    """Importing it takes half a second, and hosts that only run benchmarks lack it."""
    program = "import sys; import yardstick_llm.gateway.app; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
