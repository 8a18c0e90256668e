"""The engines, and what sends them messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.composition.parts import connector
from gateway.metrics.telemetry import Telemetry
from gateway.pool.discovery import discover
from gateway.pool.dispatch import Dispatcher
from gateway.pool.fanout import FanOut
from gateway.pool.pool import Names, Pool
from gateway.settings import Settings
from gateway.workers.workers import Workers


@dataclass(frozen=True)
class Fleet:
    """The engines of a gateway. :class:`~gateway.composition.background.Background` starts and stops its parts."""

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
            {entry: discover(entry, resolve_seconds=settings.resolve_seconds) for entry in settings.engines},
            connector(settings),
            telemetry,
            workers,
            probe_seconds=settings.probe_seconds,
            silence_seconds=settings.silence_seconds,
            startup_seconds=settings.startup_seconds,
            presets=settings.chosen_presets,
            names=Names(settings.chosen_aliases, settings.chosen_fallbacks),
        )
        return cls(dispatcher, fan_out, pool)
