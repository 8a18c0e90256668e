"""Sends requests to a gateway, many at a time and again while it is busy, and shows the progress."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from yardstick_llm.gateway.commands import CommandError, WrongUsage
from yardstick_llm.gateway.errors import ErrorBody

TIMEOUT = httpx.Timeout(600.0, connect=5.0, pool=None)
LINE_SECONDS = 10.0
"""Time between two lines of progress where standard error is no terminal."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0
_LOST_ATTEMPTS = 3
"""Attempts of a request whose connection or engine (502) is lost while other requests succeed: it may be the cause."""
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """A gateway."""

    url: str
    api_key: str | None
    own: bool = False
    """Whether the command has started it, so that no proxy of the environment applies."""
    check: Callable[[], None] = lambda: None
    """Raises :class:`CommandError` if the server is the command's own and has ended."""

    def client(self, connections: int = 1) -> httpx.AsyncClient:
        """Return a client. Raises :class:`WrongUsage`."""
        if not self.url.startswith(("http://", "https://")):
            raise WrongUsage(f"--url is {self.url!r}; it begins with http:// or https://")
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        try:
            return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=not self.own)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise WrongUsage(f"--url or --api-key cannot be used ({error}); check for typing errors") from None


@dataclass(frozen=True, slots=True)
class Call:
    """A request."""

    path: str
    body: bytes = b""
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a request."""

    status: int | None = None
    """None if there was no answer."""
    content: bytes = b""
    request_id: str | None = None
    problem: str | None = None
    """The server's reason for its refusal, or why there is no answer; None if the request succeeded."""
    code: str | None = None
    param: str | None = None
    """The field of the request that the server names."""

    def usable(self) -> bytes:
        """Return the content. Raises :class:`CommandError` if the request failed."""
        if self.problem is not None:
            raise CommandError(f"the server refused: {self.problem}")
        return self.content


class Sender:
    """Sends the requests of a command.

    Their number in flight follows the server: an answer 429 halves it, and each round of successes adds one, up to the maximum.
    """

    def __init__(self, server: Server, concurrency: int, retry_seconds: float = 600.0) -> None:
        """``retry_seconds``: the longest time that a request waits for a busy server. Raises :class:`WrongUsage`."""
        self._server = server
        self._client = server.client(concurrency)
        self._retry_seconds = retry_seconds
        self._most = self._places = concurrency
        self._free = asyncio.Semaphore(concurrency)
        """Its permits and those taken are ``_places``, which follows ``_allowed`` when a request ends."""
        self._allowed = float(concurrency)
        self._cuts = 0
        self._answered = False
        self._last_success = time.monotonic()
        self._not_before = 0.0
        """Time before which the server wants no request (Retry-After)."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.aclose()

    async def send(self, call: Call) -> Answer:
        """Return the answer, or the refusal of this one request. Raises :class:`CommandError` if the server cannot be reached or
        stays busy."""
        await self._free.acquire()
        try:
            return await self._send(call)
        finally:
            if self._places > int(self._allowed):
                self._places -= 1
            else:
                self._free.release()
            while self._places < int(self._allowed):
                self._places += 1
                self._free.release()

    async def _send(self, call: Call) -> Answer:
        started, attempt, lost, first_lost = time.monotonic(), 0, 0, 0.0
        while True:
            while (wait := self._not_before - time.monotonic()) > 0:  # noqa: ASYNC110 - the time may move while this waits
                await asyncio.sleep(wait)
            cuts, attempt = self._cuts, attempt + 1
            try:
                response = await self._client.request(call.method, call.path, content=call.body)
            except httpx.ReadTimeout:
                return Answer(problem=f"no answer within {TIMEOUT.read:g} s")
            except httpx.InvalidURL as error:
                return Answer(problem=f"the path {call.path[:200]!r} cannot be used ({error})")
            except httpx.RequestError as error:
                reason, wait = str(error) or type(error).__name__, _backoff(attempt)
                if not self._answered:
                    raise CommandError(
                        f"no answer from {self._server.url} ({reason}); check --url, or start a server with `yardstick serve`"
                    ) from None
                if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):  # else the server has not seen the request
                    lost, first_lost = lost + 1, first_lost or time.monotonic()
                if lost >= _LOST_ATTEMPTS and self._last_success > first_lost:
                    return Answer(problem=f"no answer in {attempt} attempts ({reason})")
            else:
                self._answered = True
                if response.status_code == 429 and cuts == self._cuts:  # requests sent before a cut do not cut again
                    self._cuts, self._allowed = cuts + 1, max(1.0, self._allowed / 2)
                asked = _retry_after(response)
                if response.status_code in (429, 503) and asked is not None:
                    self._not_before = max(self._not_before, time.monotonic() + min(asked, self._retry_seconds))
                    wait = max(asked, 0.01) * random.uniform(1.0, 1.25)
                elif response.status_code == 502 and attempt < _LOST_ATTEMPTS:
                    wait = _backoff(attempt)
                else:
                    if response.is_success:
                        self._allowed = min(self._most, self._allowed + 1 / self._allowed)
                        self._last_success = time.monotonic()
                    return answer_of(response)
                reason = f"HTTP status {response.status_code}"
            await asyncio.to_thread(self._server.check)
            seconds = time.monotonic() - started
            if seconds + wait > self._retry_seconds:
                if self._last_success > started and wait <= self._retry_seconds:  # others succeed
                    return Answer(problem=f"not accepted within {seconds:.0f} s ({reason})")
                raise CommandError(
                    f"{self._server.url} did not accept a request for {seconds:.0f} s and wants {wait:.0f} s more ({reason});"
                    " repeat the command later"
                )
            await asyncio.sleep(wait)


def answer_of(response: httpx.Response) -> Answer:
    """Return the answer of a response that has been read."""
    status, request_id = response.status_code, response.headers.get("x-request-id")
    if response.is_success:
        return Answer(status, response.content, request_id)
    hint = " Send the key with --api-key or YARDSTICK_API_KEY." if status == 401 else ""
    try:
        detail = msgspec.json.decode(response.content, type=ErrorBody).error
    except ValueError:  # also of bytes that are not UTF-8
        return Answer(status, response.content, request_id, f"HTTP status {status}{hint}")
    return Answer(status, response.content, request_id, f"{detail.message}{hint}", detail.code, detail.param)


def decoded(content: bytes, kind: type[T], url: str) -> T:
    """Decode an answer of a gateway. Raises :class:`CommandError` for one of another server."""
    try:
        return msgspec.json.decode(content, type=kind)
    except ValueError:
        raise CommandError(f"{url} did not answer as a Yardstick gateway does; check --url") from None


def _backoff(attempt: int) -> float:
    return min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (attempt - 1)) * random.uniform(0.75, 1.25)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After; None if there is no such header. A date means one second."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if (text := response.headers.get(name)) is not None:
            try:
                return max(0.0, float(text) * scale)
            except ValueError:
                return 1.0
    return None


class Report:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, total: int) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(title, total=max(1, total), counts="")
        self._title = title
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, counts: str) -> None:
        """Show that ``done`` of ``total`` is done; ``counts`` says it in words."""
        self._bar.update(self._task, completed=done, total=max(1, total), counts=counts)
        if not self._console.is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"{self._title}: {100 * done / max(1, total):.0f} %, {counts}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, soft_wrap=True)
