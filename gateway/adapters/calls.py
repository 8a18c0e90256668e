"""Calls that load or unload one adapter on several engines at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec

from engine import wire
from gateway.errors import AdapterNotFound, EngineSilent, GatewayError, InvalidRequest
from gateway.pool.pool import Pool
from gateway.pool.replica import Replica

T = TypeVar("T")

CALL_SECONDS = 300.0
"""Longest time of one engine for loading an adapter, which it may have to download."""


class Outcome(msgspec.Struct, frozen=True):
    """The answers of a model's engines to one call."""

    done: list[Replica]
    failed: list[tuple[Replica, GatewayError]]
    adapter: wire.Adapter | None = None
    """The adapter that ``done`` loaded; None for an unload."""


def replicas_of(pool: Pool, base: str) -> list[Replica]:
    """Return the engines of all versions of the model called ``base``, ready or not."""
    return [replica for served in pool.versions(base) for replica in served.replicas]


async def load_on(replicas: Sequence[Replica], load: wire.LoadAdapter) -> Outcome:
    """Load an adapter on all ``replicas``. One whose weights differ from those of most others counts as failed."""
    answers = await _all([_limited(replica.client.load_adapter(load)) for replica in replicas])
    loaded = {replica: answer for replica, answer in zip(replicas, answers, strict=True) if isinstance(answer, wire.Adapter)}
    failed = [(replica, answer) for replica, answer in zip(replicas, answers, strict=True) if isinstance(answer, GatewayError)]
    if not loaded:
        return Outcome([], failed)
    digest = Counter(adapter.digest for adapter in loaded.values()).most_common(1)[0][0]
    for replica, adapter in loaded.items():
        if adapter.digest != digest:
            message = "The path has other weights there than on other engines; use a volume that all engines share."
            failed.append((replica, InvalidRequest(message, param="lora_path")))
    done = [replica for replica, adapter in loaded.items() if adapter.digest == digest]
    return Outcome(done, failed, loaded[done[0]])


async def unload_on(replicas: Sequence[Replica], name: str) -> Outcome:
    """Unload an adapter on all ``replicas``. Those that do not have it are neither done nor failed."""
    answers = await _all([_limited(_unload(replica, name)) for replica in replicas])
    pairs = list(zip(replicas, answers, strict=True))
    failed = [(replica, answer) for replica, answer in pairs if isinstance(answer, GatewayError)]
    return Outcome(
        [replica for replica, answer in pairs if answer is None],
        [(replica, error) for replica, error in failed if not isinstance(error, AdapterNotFound)],
    )


async def _unload(replica: Replica, name: str) -> None:
    await replica.client.unload_adapter(wire.UnloadAdapter(name))


async def _limited(call: Awaitable[T]) -> T | GatewayError:
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return await call
    except TimeoutError:
        return EngineSilent(f"The engine did not answer within {CALL_SECONDS:g} s.")
    except GatewayError as error:
        return error


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*calls))
