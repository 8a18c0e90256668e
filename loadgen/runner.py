"""Performs one run, from its start to its records, and handles the signals that end it early."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvloop

from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.client import Client, tidy
from yardstick_llm.loadgen.errors import LoadError, reason_of
from yardstick_llm.loadgen.maker import Maker, Order
from yardstick_llm.loadgen.records import Recorder, Run, RunInfo
from yardstick_llm.loadgen.scenario import Scenario, as_settings
from yardstick_llm.loadgen.scrapes import Scraper
from yardstick_llm.loadgen.statistics import failure_kind, percentile

WAIT_SECONDS = 600.0
"""Longest wait for the other workers."""
_LOG_SECONDS = 5.0
"""Interval between two lines of progress if the output is not a terminal."""
_PACKAGES = ("yardstick-llm", "aiohttp", "uvloop")


def run(
    scenario: Scenario, share: Share, api_key: str | None, command: str, folder: Path | None, together: Path | None = None
) -> Run:
    """Run the scenario; SIGINT and SIGTERM end it early with the records so far. Raises :class:`LoadError`.

    ``together``: a folder that all workers share, to start when all are ready.
    """
    _raise_limit()
    recorder = Recorder(folder)
    try:
        return uvloop.run(_run(scenario, share, api_key, command, recorder, together))
    finally:
        recorder.close()


async def _run(
    scenario: Scenario, share: Share, api_key: str | None, command: str, recorder: Recorder, together: Path | None
) -> Run:
    client = Client(scenario, share, api_key)
    machine = _machine()
    scraper = Scraper(scenario.target.metrics if share.index == 0 else (), scenario.duration_s, client.now)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, client.stop)
    tell = _Teller()
    tell.say("making requests")
    async with Maker(Order(scenario, share)) as maker:
        await scraper.read(0.0)
        if together is not None:
            tell.say("waiting for the other workers")
            await meet(together, share, lambda: client.interrupted)
        info = RunInfo(scenario=as_settings(scenario), started=client.start(), command=command, machine=machine, share=share)
        recorder.begin(info)
        tell.say(f"sending to {scenario.target.url} for {scenario.duration_s:g} s")
        beside = [
            asyncio.create_task(tell.follow(client, scenario.duration_s, recorder)),
            asyncio.create_task(scraper.follow()),
        ]
        try:
            await client.run(maker)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            tell.end()
    await scraper.read()
    scrapes = scraper.results()
    recorder.add(client.records)
    recorder.finish(client.interrupted, scrapes)
    records = sorted(client.records, key=lambda record: record.scheduled)
    return Run([info], records, client.interrupted, scrapes, recorder.problem)


def _raise_limit() -> None:
    """Raise the limit on open files, and so on connections, as far as this user may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Teller:
    """Writes the progress to standard error: one updated line on a terminal, separate lines in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Write ``text``; on a terminal, it replaces the previous line."""
        print(f"\r\x1b[2K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal:
            self.say("")

    async def follow(self, client: Client, duration_s: float, recorder: Recorder) -> None:
        """Report the state of ``client`` and save its records, each second until cancelled."""
        reported, last = 0, 0.0
        while True:
            await asyncio.sleep(1)
            tidy()
            recorder.add(client.records)
            if self._terminal or client.now() - last >= _LOG_SECONDS:
                self.say(_progress(client, reported, duration_s))
                reported, last = len(client.records), client.now()


def _progress(client: Client, reported: int, duration_s: float) -> str:
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


async def meet(folder: Path, share: Share, stopped: Callable[[], bool]) -> None:
    """Create a file in ``folder``, and return once every worker's file is there, or the run was stopped.

    Raises :class:`LoadError` if they are not ready in time.
    """
    mine, deadline = folder / f"ready-{share.index}-of-{share.of}", time.monotonic() + WAIT_SECONDS
    try:
        folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
        if mine.exists():
            raise LoadError(f"{mine} is left from an earlier run; choose another folder for --together")
        mine.touch(exist_ok=False)
        while (ready := len(list(folder.glob(f"ready-*-of-{share.of}")))) < share.of and not stopped():  # noqa: ASYNC240
            if time.monotonic() > deadline:
                remedy = "start all, with the same --together"
                raise LoadError(f"{ready} of {share.of} workers were ready within {WAIT_SECONDS:g} s; {remedy}")
            await asyncio.sleep(0.05)
    except OSError as error:
        reason = reason_of(error)
        raise LoadError(f"cannot use {folder} for --together: {reason}; name a folder that all workers can write") from None


def _machine() -> dict[str, str | int | float]:
    """Return the generator's processor, cores, load, host and versions; those of the server are unknown here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found: dict[str, str | int | float] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": next(names, platform.processor()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _commit() -> str:
    """Return the commit of this checkout, marked if files differ from it; ``unknown`` outside a checkout, as in an image."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else "unknown"
