"""Reports the progress of a run: one updated line on a terminal, separate lines in a log."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Protocol

from loadgen.client import Client, tidy
from loadgen.records import Record
from loadgen.statistics import failure_kind, percentile

_SECONDS = 1.0
_LOG_SECONDS = 5.0
"""Interval between two lines if the output is not a terminal."""


class Saves(Protocol):
    """A store of records."""

    def add(self, records: list[Record]) -> None:
        """Store the new ones of ``records``."""


class Teller:
    """Writes the progress to standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Write ``text``; on a terminal, it replaces the previous line."""
        print(f"\r\x1b[2K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal:
            self.say("")

    async def follow(self, client: Client, duration_s: float, saves: Saves) -> None:
        """Report the state of ``client`` and save its records, each second until cancelled."""
        reported, last = 0, 0.0
        while True:
            await asyncio.sleep(_SECONDS)
            tidy()
            saves.add(client.records)
            if self._terminal or client.now() - last >= _LOG_SECONDS:
                self.say(line(client, reported, duration_s))
                reported, last = len(client.records), client.now()


def line(client: Client, reported: int, duration_s: float) -> str:
    """Return the state, with percentiles of the records from index ``reported`` on."""
    new = client.records[reported:]
    latencies = sorted(record.latency for record in new if record.failure is None)
    lags = sorted(record.lag for record in new)
    failures = Counter(failure_kind(record) for record in new if record.failure is not None)
    parts = [
        f"{client.now():.0f} s of {duration_s:g}",
        f"{client.sent} sent",
        f"{len(client.records)} ended",
        f"{client.in_flight} in flight",
    ]
    if latencies:
        parts.append(f"P50 {1000 * percentile(latencies, 50):.1f} ms, P99 {1000 * percentile(latencies, 99):.1f} ms")
    if lags:
        parts.append(f"lag P99 {1000 * percentile(lags, 99):.1f} ms")
    if failures:
        parts.append("failed: " + ", ".join(f"{count} × {kind}" for kind, count in failures.most_common()))
    return " · ".join(parts)
