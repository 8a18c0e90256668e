"""Performs one run, from its start to its records, and handles the signals that end it early."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec
import uvloop

from loadgen.arrivals import Share
from loadgen.barrier import meet
from loadgen.client import Client
from loadgen.errors import LoadError, reason_of
from loadgen.machine import describe
from loadgen.maker import Maker, Order
from loadgen.progress import Teller
from loadgen.records import RECORDS, Record, Run, RunEnd, RunInfo
from loadgen.scenario import Scenario, as_settings
from loadgen.scrapes import Scrape, Scraper


class Recorder:
    """The file of records. It is written during the run, so that little is lost if the process ends. A full disk does not end the
    run: the file then keeps the records so far, as whole lines, and ``problem`` has the reason."""

    def __init__(self, folder: Path | None) -> None:
        """Open the file; without a ``folder``, nothing is written. Raises :class:`LoadError`."""
        self.problem = ""
        self._written = 0
        self._whole = 0  # length of the file up to the last complete write
        self._stream: FileIO | None = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._stream = FileIO(folder / RECORDS, "a")
            except OSError as error:
                raise LoadError(f"cannot write to {folder}: {reason_of(error)}; choose another --out") from None

    def begin(self, info: RunInfo) -> None:
        """Write the first line, in place of earlier records: a run that cannot begin leaves them."""
        if self._stream is not None:
            self._stream.truncate(0)
        self._write([info])

    def add(self, records: Sequence[Record]) -> None:
        """Append the new ones of ``records``."""
        new = records[self._written :]
        self._written += len(new)
        self._write(new)

    def finish(self, interrupted: bool, scrapes: Sequence[Scrape]) -> None:
        """Write the servers' metrics and the last line."""
        self._write([*scrapes, RunEnd(interrupted)])

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _write(self, documents: Sequence[msgspec.Struct]) -> None:
        if self._stream is None or self.problem:
            return
        text = memoryview(b"".join(msgspec.json.encode(document) + b"\n" for document in documents))
        try:
            sent = 0
            while sent < len(text):
                sent += self._stream.write(text[sent:])
            self._whole += len(text)
        except OSError as error:
            self.problem = reason_of(error)
            with suppress(OSError):
                self._stream.truncate(self._whole)


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
    machine = describe()
    scraper = Scraper(scenario.target.metrics if share.index == 0 else (), scenario.duration_s, client.now)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, client.stop)
    tell = Teller()
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
