"""The result of each request, and the file format: one JSON document per line, the description of the run first.

Files of several workers may be concatenated: a line that describes a run begins the records of that run.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.errors import LoadError, reason_of

Failure = Literal["connect", "exhausted", "lost", "timeout", "status", "bad_body", "cut", "stream_error", "unfinished"]
"""
- ``connect``: no connection: name not found, refused, TLS
- ``exhausted``: this machine has no file descriptor or port left; the fault of the generator
- ``lost``: the connection ended before an answer began
- ``timeout``: not done within ``target.timeout_s``
- ``status``: an HTTP status other than 200
- ``bad_body``: the answer is not what the API promises: no JSON, or not a score for every item and label
- ``cut``: the answer ended in its middle; a stream without ``[DONE]``
- ``stream_error``: the stream's last event was an error
- ``unfinished``: under way when the run was ended by a signal
"""


class Record(msgspec.Struct, gc=False, omit_defaults=True):
    """One request. Times are seconds from the start of the run."""

    workload: str
    scheduled: float
    """Due time. In a closed loop, the time at which the client was free to send."""
    sent: float
    """Time at which the request was passed to the connection pool."""
    end: float
    """End of the answer, or of the attempt."""
    first_byte: float | None = None
    """Arrival of the response's head."""
    first_token: float | None = None
    """Arrival of the stream's first text."""
    last_token: float | None = None
    gaps: list[float] | None = None
    """Seconds between consecutive pieces of the stream's text."""
    status: int | None = None
    failure: Failure | None = None
    detail: str = ""
    """For a failure: the message of the server or the operating system."""
    turn: int = 0
    """Place in a conversation of several turns, from 0."""
    items: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache: str = ""
    """The header ``x-yardstick-cache``: hits/items."""
    retry_after: float | None = None
    """Retry-After header in seconds."""

    @property
    def latency(self) -> float:
        """Latency from the due time, so that delays of the generator or the server are included."""
        return self.end - self.scheduled

    @property
    def lag(self) -> float:
        """Delay between the due time and sending."""
        return self.sent - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Time to first token, from the due time."""
        return None if self.first_token is None else self.first_token - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.first_token is None or self.last_token is None or self.completion_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.completion_tokens - 1)


class Scrape(msgspec.Struct, tag_field="record", tag="metrics"):
    """One read of a page."""

    url: str
    time: float
    """Seconds from the start of the run."""
    counters: dict[str, float] = {}
    """Value of each counter, by name with labels. Histograms have two: sum and count."""
    gauges: dict[str, float] = {}
    error: str = ""
    """Why the page could not be read."""


class RunInfo(msgspec.Struct, kw_only=True, tag_field="record", tag="run"):
    """Scenario, place and time of a run."""

    scenario: dict[str, Any]
    """All values of the scenario, with defaults."""
    started: float
    """Time 0 of the records, in seconds since 1970."""
    command: str
    machine: dict[str, str | int | float]
    share: Share = Share()


class RunEnd(msgspec.Struct, tag_field="record", tag="end"):
    """Last line of a file; it is missing if the run was killed."""

    interrupted: bool
    """Whether a signal ended the run early."""


class Run(msgspec.Struct):
    """Records of one worker, or of several on one clock."""

    infos: list[RunInfo]
    records: list[Record]
    interrupted: bool = True
    """Whether some worker did not complete its run."""
    scrapes: list[Scrape] = []
    """Metrics of the servers."""
    unwritten: str = ""
    """The reason why not all records could be written to the file, if so."""

    @property
    def scenario(self) -> dict[str, Any]:
        """Scenario of the first worker; :func:`merge` checks that all workers have the same one."""
        return self.infos[0].scenario


Timed = TypeVar("Timed", Record, Scrape)


def merge(runs: Sequence[Run]) -> Run:
    """Merge the workers of one run and align their clocks. Raises :class:`LoadError` if they are not of one run."""
    infos = [info for run in runs for info in run.infos]
    if not infos:
        raise LoadError("there are no records; name the folder or file that a run has left")
    if any(info.scenario != infos[0].scenario or info.share.of != infos[0].share.of for info in infos):
        raise LoadError("the records are of different scenarios; `yardstick load compare` sets two runs side by side")
    indices = sorted(info.share.index for info in infos)
    if indices != list(range(infos[0].share.of)):
        raise LoadError(f"there are records of workers {indices}, of {infos[0].share.of}; give those of each worker once")
    start = min(info.started for info in infos)
    records, scrapes = [], []
    for run in runs:
        later = run.infos[0].started - start
        records += [_shifted(record, later) for record in run.records]
        scrapes += [_shifted(scrape, later) for scrape in run.scrapes]
    return Run(infos, sorted(records, key=lambda record: record.scheduled), any(run.interrupted for run in runs), scrapes)


def _shifted(timed: Timed, by: float) -> Timed:
    if not by:
        return timed
    names = ("scheduled", "sent", "end", "first_byte", "first_token", "last_token", "time")
    times = {name: value + by for name in names if (value := getattr(timed, name, None)) is not None}
    return msgspec.structs.replace(timed, **times)


RECORDS = "records.jsonl"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create ``folder``, and convert errors of writing to :class:`LoadError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise LoadError(f"cannot write to {folder}: {reason_of(error)}; choose another --out") from None


def read(sources: Sequence[Path]) -> list[Run]:
    """Read the runs in folders and files, one per worker. Raises :class:`LoadError`."""
    runs: list[Run] = []
    for source in sources:
        file = source / RECORDS if source.is_dir() else source
        try:
            runs += parse(file.read_bytes().splitlines(), str(file))
        except OSError as error:
            raise LoadError(f"cannot read {file}: {reason_of(error)}") from None
    return runs


def write(runs: Sequence[Run], folder: Path) -> None:
    """Write the records of all workers, one after another. Raises :class:`LoadError`."""
    with writing(folder), (folder / RECORDS).open("wb") as stream:
        for run in runs:
            stream.write(encode(run))


def encode(run: Run) -> bytes:
    """Return one worker's records in the file format."""
    (info,) = run.infos
    return _lines([info, *run.records, *run.scrapes, RunEnd(run.interrupted)])


def _lines(documents: Sequence[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(document) + b"\n" for document in documents)


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
            with writing(folder):
                self._stream = FileIO(folder / RECORDS, "a")

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
        text = memoryview(_lines(documents))
        try:
            sent = 0
            while sent < len(text):
                sent += self._stream.write(text[sent:])
            self._whole += len(text)
        except OSError as error:
            self.problem = reason_of(error)
            with suppress(OSError):
                self._stream.truncate(self._whole)


_run_decoder = msgspec.json.Decoder(RunInfo)
_end_decoder = msgspec.json.Decoder(RunEnd)
_scrape_decoder = msgspec.json.Decoder(Scrape)
_record_decoder = msgspec.json.Decoder(Record)


def parse(text: Iterable[bytes], name: str) -> Iterator[Run]:
    """Yield the runs in the lines of ``text``. ``name``: the source, for messages of :class:`LoadError`."""
    run: Run | None = None
    for number, line in enumerate(text, 1):
        try:
            if line.startswith(b'{"record":"run"'):
                if run is not None:
                    yield run
                run = Run([_run_decoder.decode(line)], [])
            elif run is None:
                raise LoadError(f"{name} does not begin like a file of records; name one that `yardstick load` has left")
            elif line.startswith(b'{"record":"end"'):
                run.interrupted = _end_decoder.decode(line).interrupted
            elif line.startswith(b'{"record":"metrics"'):
                run.scrapes.append(_scrape_decoder.decode(line))
            else:
                run.records.append(_record_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LoadError(f"{name}, line {number} is not a record ({error}); the file may be truncated") from None
    if run is not None:
        yield run


_MARK = "yardstick-load-records"
_CHARACTERS = 12_000
"""Length of a log line in characters, because container runtimes break lines at 16 KiB."""


def to_log(run: Run) -> Iterator[str]:
    """Yield one worker's records as compressed log lines; :func:`from_log` finds them among other log lines."""
    text = base64.b64encode(zlib.compress(encode(run), 9)).decode()
    pieces = [text[place : place + _CHARACTERS] for place in range(0, len(text), _CHARACTERS)]
    for number, piece in enumerate(pieces, 1):
        yield f"{_MARK} {run.infos[0].share.index} {number}/{len(pieces)} {piece}"


def from_log(log: Iterable[str]) -> list[Run]:
    """Read the runs from the logs of one or several workers, in any order. Raises :class:`LoadError`."""
    pieces: dict[str, dict[int, str]] = {}
    totals: dict[str, int] = {}
    for line in log:
        words = line[line.find(_MARK) :].split() if _MARK in line else []
        if len(words) == 4:
            number, _, total = words[2].partition("/")
            pieces.setdefault(words[1], {})[int(number)] = words[3]
            totals[words[1]] = int(total)
    if not pieces:
        raise LoadError("the log has no records; run with --log-records, and read the log to its end")
    runs: list[Run] = []
    for worker, parts in sorted(pieces.items()):
        if len(parts) != totals[worker]:
            raise LoadError(f"the log has {len(parts)} of the {totals[worker]} lines of worker {worker}; read it from its start")
        raw = zlib.decompress(base64.b64decode("".join(part for _, part in sorted(parts.items()))))
        runs += parse(raw.splitlines(), f"the log of worker {worker}")
    return runs
