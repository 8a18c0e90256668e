"""Sends requests, and sends them again while the server is busy."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import httpx
import msgspec

from gateway.commands.errors import CommandError, WrongUsage
from gateway.commands.offline.places import Places
from gateway.commands.offline.tasks.base import Answer, Call, Refusal
from gateway.errors import ErrorBody

_TIMEOUT = httpx.Timeout(600.0, connect=5.0, pool=None)
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_LOST_ATTEMPTS = 3
"""Attempts of a request whose connection or engine (502) is lost while other requests succeed: it may be the cause."""


@dataclass(frozen=True)
class Server:
    """A gateway to send requests to."""

    url: str
    api_key: str | None
    trust_env: bool = True
    """Whether proxies of the environment apply."""

    def client(self, connections: int) -> httpx.AsyncClient:
        """Return a client. Raises :class:`WrongUsage`."""
        if not self.url.startswith(("http://", "https://")):
            raise WrongUsage(f"--url is {self.url!r}; it begins with http:// or https://")
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        try:
            return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=self.trust_env)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise WrongUsage(f"--url or --api-key cannot be used ({error}); check for typing errors") from None


class Sender:
    """Sends the requests of a run."""

    def __init__(self, client: httpx.AsyncClient, url: str, places: Places, retry_seconds: float) -> None:
        """``retry_seconds``: the longest time that a request waits for a busy server."""
        self._client = client
        self._url = url
        self._places = places
        self._retry_seconds = retry_seconds
        self._answered = False
        self._last_success = time.monotonic()
        self._not_before = 0.0
        """Time before which the server wants no request (Retry-After)."""

    async def send(self, call: Call) -> Answer | Refusal:
        """Return the answer. Raises :class:`CommandError` if the server cannot be reached or stays busy."""
        started, attempt = time.monotonic(), 0
        lost, first_lost = 0, 0.0
        while True:
            await self._wait_for_server()
            attempt += 1
            try:
                response = await self._client.request(call.method, call.path, content=call.body)
            except httpx.ReadTimeout:
                return Refusal(f"no answer within {_TIMEOUT.read:g} s")
            except httpx.InvalidURL as error:
                return Refusal(f"the path {call.path[:200]!r} cannot be used ({error})")
            except httpx.RequestError as error:
                reason, wait = str(error) or type(error).__name__, _backoff(attempt)
                if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):  # the server has not seen the request
                    lost, first_lost = lost + 1, first_lost or time.monotonic()
                if not self._answered:
                    raise CommandError(f"no answer from {self._url} ({reason}); check --url, and that the server runs") from None
                if lost >= _LOST_ATTEMPTS and self._last_success > first_lost:
                    return Refusal(f"no answer in {attempt} attempts ({reason})")
            else:
                self._answered = True
                wanted = self._wait(response, attempt)
                if wanted is None:
                    return self._final(response)
                reason, wait = f"HTTP status {response.status_code}", wanted
            if time.monotonic() + wait - started > self._retry_seconds:
                return self._impatient(started, wait, reason)
            await asyncio.sleep(wait)

    async def _wait_for_server(self) -> None:
        while (wait := self._not_before - time.monotonic()) > 0:  # noqa: ASYNC110 - the time may move while this waits
            await asyncio.sleep(wait)

    def _wait(self, response: httpx.Response, attempt: int) -> float | None:
        """Return the seconds after which to send again; None if the answer is final."""
        status, asked = response.status_code, _retry_after(response)
        if status == 429:
            self._places.refused()
        if status in (429, 503) and asked is not None:
            self._not_before = max(self._not_before, time.monotonic() + min(asked, self._retry_seconds))
            return max(asked, 0.01) * random.uniform(1.0, 1.25)
        if status == 502 and attempt < _LOST_ATTEMPTS:
            return _backoff(attempt)
        return None

    def _final(self, response: httpx.Response) -> Answer | Refusal:
        request_id = response.headers.get("x-request-id")
        if response.is_success:
            self._places.succeeded()
            self._last_success = time.monotonic()
            return Answer(response.status_code, request_id, response.content)
        try:
            detail = msgspec.json.decode(response.content, type=ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Refusal(
                f"HTTP status {response.status_code}", response.status_code, request_id=request_id, content=response.content
            )
        return Refusal(detail.message, response.status_code, detail.code, detail.param, request_id, response.content)

    def _impatient(self, started: float, wait: float, reason: str) -> Refusal:
        """Return the refusal of one request that waited too long.

        Raises :class:`CommandError` if no other succeeded meanwhile, or if the server wants one longer wait, as for a daily quota.
        """
        seconds = time.monotonic() - started
        if self._last_success > started and wait <= self._retry_seconds:
            return Refusal(f"not accepted within {seconds:.0f} s ({reason})")
        raise CommandError(
            f"{self._url} did not accept a request for {seconds:.0f} s and wants {wait:.0f} s more ({reason});"
            " the same command continues the run"
        )


def _backoff(attempt: int) -> float:
    return min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (attempt - 1)) * random.uniform(0.75, 1.25)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After; None if there is no such header. A date means one second."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text: str | None = response.headers.get(name)
        if text is None:
            continue
        try:
            seconds: float = float(text) * scale
        except ValueError:
            return 1.0
        return max(0.0, seconds)
    return None
