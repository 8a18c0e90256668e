"""Sends each request at its due time, whether or not earlier answers have arrived, and records the results.

Answers are checked against the API, their tokens are counted, and the arrival of text is timed.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress

import aiohttp
import msgspec
from yarl import URL

from yardstick_llm.loadgen.arrivals import Closed, Share
from yardstick_llm.loadgen.maker import Due, Maker
from yardstick_llm.loadgen.records import Failure, Record
from yardstick_llm.loadgen.scenario import Scenario
from yardstick_llm.loadgen.workloads import AnyWorkload, Chat, Embeddings, Generation, Rerank, Score, follow_up

SETTLE_SECONDS = 0.1
"""Pause between the last preparation and the first arrival."""
_TICK = 0.001
"""Shortest sleep in seconds; the event loop's timers are not more accurate."""
_IDLE_SECONDS = 3.0
"""Idle connections are closed before servers close them (commonly after 5 s); a request sent at that moment would be lost."""
_PATHS = {
    "score": "/v1/score",
    "rerank": "/v1/rerank",
    "embeddings": "/v1/embeddings",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS}
_DETAIL = 200
"""Most characters of an error message that are kept."""


class BadAnswer(Exception):
    """The response violates the API; the message says how."""


class StreamFailed(Exception):
    """The stream ended with an error event; the message is the server's."""


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Scores(msgspec.Struct):
    scores: list[list[float]]
    usage: _Usage = _Usage()


class _Result(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Result]
    usage: _Usage = _Usage()


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage = _Usage()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    """One choice of a chat or completion, whole or streamed."""

    message: _Message | None = None
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str | None:
        message = self.message or self.delta
        return message.content if message is not None else self.text


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Generation(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_generation = msgspec.json.Decoder(_Generation)


class Client:
    """Run of one worker. :attr:`records` grows as requests end."""

    def __init__(self, scenario: Scenario, share: Share, api_key: str | None) -> None:
        self.records: list[Record] = []
        self.sent = 0
        self.interrupted = False
        self._scenario = scenario
        self._share = share
        self._key = api_key
        self._start = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[None] | None = None
        base = scenario.target.url.rstrip("/")
        self._urls = [URL(base + _PATHS[workload.kind]) for workload in scenario.workloads]
        self._titles = [workload.title for workload in scenario.workloads]

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and have not ended."""
        return self.sent - len(self.records)

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self._start  # the event loop's own clock has a resolution of milliseconds

    def stop(self) -> None:
        """Send no more requests, and abandon those in progress."""
        self.interrupted = True
        if self._work is not None:
            self._work.cancel()

    def start(self) -> float:
        """Set the start of the run to a moment from now; return it in seconds since 1970."""
        self._start = time.perf_counter() + SETTLE_SECONDS
        return time.time() + SETTLE_SECONDS

    async def run(self, maker: Maker) -> None:
        """Send all requests of ``maker``; return when every request has ended. Raises :class:`LoadError`."""
        if self.interrupted:
            return
        async with self._make_session() as self._session:
            with _undisturbed():
                self._work = asyncio.create_task(self._send_all(maker))
                with suppress(asyncio.CancelledError):
                    await self._work

    def _make_session(self) -> aiohttp.ClientSession:
        target = self._scenario.target
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        headers |= {} if target.cache else {"cache-control": "no-cache"}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        connections = {"keepalive_timeout": _IDLE_SECONDS} if target.keep_alive else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=0, **connections)
        timeout = aiohttp.ClientTimeout(total=target.timeout_s)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())

    async def _send_all(self, maker: Maker) -> None:
        arrivals = self._scenario.arrivals
        try:
            if isinstance(arrivals, Closed):
                for _ in range(arrivals.clients_of(self._share)):
                    self._begin(self._one_after_another(maker, arrivals.think_s))
            else:
                await self._send_scheduled(maker)
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_scheduled(self, maker: Maker) -> None:
        while (due := await maker.next()) is not None:
            await self._until(due.scheduled)
            self._begin(self._converse(due, due.scheduled))

    async def _until(self, due: float) -> None:
        """Wait until ``due``. If it has passed, only let requests that have begun proceed."""
        if due <= self.now():
            await asyncio.sleep(0)
        while (left := due - self.now()) > 0:  # noqa: ASYNC110 - a time, not an event
            await asyncio.sleep(max(left, _TICK))

    async def _one_after_another(self, maker: Maker, pause: float) -> None:
        """Run one client of a closed loop."""
        await self._until(0.0)
        while self.now() < self._scenario.duration_s and not self.interrupted:
            due = await maker.next()
            if due is None:
                return
            await self._converse(due, self.now())
            if pause:
                await asyncio.sleep(pause)

    async def _converse(self, due: Due, scheduled: float) -> None:
        """Send one request, and after its answer the further turns of its conversation, until one fails."""
        body, workload = due.body, self._scenario.workloads[due.workload]
        text = await self._send(due, body, scheduled, 0)
        if not due.later:
            return
        assert isinstance(workload, Chat)
        for turn, message in enumerate(msgspec.json.decode(due.later, type=list[msgspec.Raw]), 1):
            if text is None:
                return
            if workload.think_s:
                await asyncio.sleep(workload.think_s)
            body = follow_up(body, text, bytes(message))
            text = await self._send(due, body, self.now(), turn)

    async def _send(self, due: Due, body: bytes, scheduled: float, turn: int) -> str | None:
        """Send one request and record its result. Return the generated text, or None if it failed. Raises nothing."""
        self.sent += 1
        title, text = self._titles[due.workload], None
        record = Record(workload=title, scheduled=scheduled, sent=self.now(), end=0.0, turn=turn, items=due.items)
        try:
            async with self._session.post(self._urls[due.workload], data=body) as response:
                record.first_byte = self.now()
                record.status = response.status
                text = await self._read(response, record, due.workload)
        except asyncio.CancelledError:
            record.failure = "unfinished"
        except (aiohttp.ClientError, TimeoutError, BadAnswer, StreamFailed, OSError) as error:
            record.failure, record.detail = _failure(error, record), self._without_key(str(error))
        record.end = self.now()
        self.records.append(record)
        return text

    async def _read(self, response: aiohttp.ClientResponse, record: Record, place: int) -> str | None:
        """Complete ``record`` from a response, and return the generated text; empty if nothing is generated.

        Raises :class:`BadAnswer`, :class:`StreamFailed` and aiohttp's errors.
        """
        record.cache = response.headers.get("x-yardstick-cache", "")
        if response.status != 200:
            record.failure = "status"
            record.retry_after = _seconds(response.headers.get("retry-after"))
            record.detail = self._without_key(_reason(await response.read()))
            return None
        workload = self._scenario.workloads[place]
        try:
            if isinstance(workload, Generation) and workload.stream:
                return await self._read_stream(response, record)
            return _read_whole(await response.read(), record, workload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(str(error)) from None

    async def _read_stream(self, response: aiohttp.ClientResponse, record: Record) -> str:
        rest, finished, done = b"", False, False
        record.gaps = []
        texts: list[str] = []
        async for chunk in response.content.iter_any():
            now = self.now()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event = line[5:].strip()
                if not line.startswith(b"data:"):
                    continue
                if event == b"[DONE]":
                    done = True
                    continue
                answer = _generation.decode(event)  # the data is one line, because it is JSON
                if answer.error is not None:
                    raise StreamFailed(answer.error.message[:_DETAIL])
                finished = finished or any(choice.finish_reason is not None for choice in answer.choices)
                if any(choice.content for choice in answer.choices):
                    texts.append(answer.choices[0].content or "")
                    if record.last_token is None:
                        record.first_token = now
                    else:
                        record.gaps.append(round(now - record.last_token, 6))
                    record.last_token = now
                if answer.usage is not None:
                    _count(answer.usage, record)
        if not done:
            raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
        if not finished:
            raise BadAnswer("a stream without a finish reason")
        return "".join(texts)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _read_whole(body: bytes, record: Record, workload: AnyWorkload) -> str:
    """Check an answer that is not streamed, and return the generated text. Raises :class:`BadAnswer` and msgspec's errors."""
    text = ""
    match workload:
        case Score():
            scored = msgspec.json.decode(body, type=_Scores)
            usage: _Usage | None = scored.usage
            if len(scored.scores) != record.items:
                raise BadAnswer(f"{len(scored.scores)} score lists for {record.items} items")
            labels = workload.label_count
            if any(len(scores) != labels for scores in scored.scores):
                raise BadAnswer(f"an item has not {labels} scores")
        case Rerank():
            ranking = msgspec.json.decode(body, type=_Ranking)
            usage = ranking.usage
            wanted, found = workload.results(record.items), {result.index for result in ranking.results}
            if len(ranking.results) != wanted or len(found) != wanted or not all(0 <= index < record.items for index in found):
                raise BadAnswer(f"{len(ranking.results)} results for {len(found)} documents, instead of one for each of {wanted}")
        case Embeddings():
            embedded = msgspec.json.decode(body, type=_Embeddings)
            usage = embedded.usage
            if [entry.index for entry in embedded.data] != list(range(record.items)):
                raise BadAnswer(f"{len(embedded.data)} embeddings for {record.items} texts, or another order")
            lengths = {len(entry.embedding) for entry in embedded.data}
            if len(lengths) != 1 or 0 in lengths:
                raise BadAnswer("embeddings of different lengths, or empty ones")
        case _:
            answer = _generation.decode(body)
            usage = answer.usage
            if not answer.choices or any(choice.content is None for choice in answer.choices):
                raise BadAnswer("an answer without text")
            text = answer.choices[0].content or ""
    if usage is not None:
        _count(usage, record)
    return text


def _count(usage: _Usage, record: Record) -> None:
    record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens or 0


def _reason(body: bytes) -> str:
    """Return the reason in a response with another status: the error's message, or the start of the body."""
    try:
        said = msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body.decode(errors="replace")
    return " ".join(said.split())[:_DETAIL]


def _failure(error: Exception, record: Record) -> Failure:
    """Return the kind of a failure."""
    match error:
        case _ if record.failure is not None:
            return record.failure  # the body of this status could not be read
        case TimeoutError():
            return "timeout"
        case BadAnswer() | aiohttp.ClientResponseError():
            return "bad_body"
        case StreamFailed():
            return "stream_error"
        case OSError() if error.errno in _EXHAUSTED:
            return "exhausted"
        case aiohttp.ClientConnectorError():
            return "connect"
    return "lost" if record.first_byte is None else "cut"


def _seconds(header: str | None) -> float | None:
    """Return ``Retry-After`` in seconds; None if it is absent or a date, which the API does not use."""
    try:
        return float(header) if header is not None else None
    except ValueError:
        return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable automatic garbage collection, whose pauses would be attributed to the server; :func:`tidy` collects regularly."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def tidy() -> None:
    """Collect the youngest objects. Called every second; it takes about a millisecond."""
    if not gc.isenabled():
        gc.collect(0)
