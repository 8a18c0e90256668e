"""The engines, and what sends them messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from gateway.ops.metrics import Telemetry
from gateway.pool.client import EngineClient, EngineToken
from gateway.pool.discovery import discover
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut
from gateway.pool.pool import Names, Pool
from gateway.pool.replica import Health, Replica
from gateway.settings import Settings, SettingsError
from gateway.workers.workers import Workers

CONNECT_SECONDS = 2.0
"""Longest wait for a connection to an engine."""
RESOLVE_SECONDS = 5.0
"""Interval between two lookups of the names in ``dns://`` entries."""
SILENCE_SECONDS = 2.0
"""Time for which an engine may leave a probe unanswered before it counts as silent. The requests of a silent engine go to other
engines, and it gets no new ones until it answers. With ``probe_seconds`` this bounds the gap in a stream whose engine stops.
Time in which the gateway itself is blocked does not count."""
STARTUP_SECONDS = 60.0
"""Time after the start in which a request for an unknown model is answered 503 and not 404 while some entry of ``engines`` has not
led to a model yet. A loading engine names its model; requests for that model are answered 503 in any case."""


@dataclass(frozen=True)
class Fleet:
    """The engines of a gateway. :class:`~gateway.app.Background` starts and stops its parts."""

    dispatcher: Dispatcher
    fan_out: FanOut
    pool: Pool

    @classmethod
    def of(cls, settings: Settings, telemetry: Telemetry, workers: Workers) -> Self:
        """Create the parts. Connects to nothing. Raises :class:`SettingsError` if the engine token is missing."""
        dispatcher = Dispatcher(
            telemetry, wait_seconds=settings.wait_seconds, max_waiting=settings.max_waiting, hedge_budget=settings.hedge_budget
        )
        fan_out = FanOut(dispatcher, telemetry, split_tokens=settings.split_tokens, idle_split_tokens=settings.idle_split_tokens)
        pool = Pool(
            {entry: discover(entry, resolve_seconds=RESOLVE_SECONDS) for entry in settings.engines},
            _connector(settings),
            telemetry,
            workers,
            probe_seconds=settings.probe_seconds,
            silence_seconds=SILENCE_SECONDS,
            startup_seconds=STARTUP_SECONDS,
            presets=settings.chosen_presets,
            names=Names(settings.chosen_aliases, settings.chosen_fallbacks),
        )
        return cls(dispatcher, fan_out, pool)


def _connector(settings: Settings) -> Callable[[str, str], Replica]:
    """Return a function that creates the replica for a URL and the entry that listed it. Raises :class:`SettingsError` if the
    engine token is missing."""
    try:
        token = EngineToken(settings.engine_token_file) if settings.engine_token_file else None
    except (OSError, ValueError) as error:
        raise SettingsError(f"YARDSTICK_ENGINE_TOKEN_FILE: {error}") from None

    def connect(url: str, entry: str) -> Replica:
        client = EngineClient(url, connect_seconds=CONNECT_SECONDS, engine_seconds=settings.engine_seconds, token=token)
        return Replica(client, entry, Health())

    return connect
