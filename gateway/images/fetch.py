"""Fetches images from URLs of clients, from hosts that the operator lists.

A server that fetches what clients name can be turned against its own network (server-side request forgery). So no other host is
asked, redirects are not followed, and no cookies, credentials or proxies are used. Time, bytes, type and the number of fetches at a
time are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

import httpx

from gateway.images.errors import ImageError, InvalidImage
from gateway.images.room import Take
from gateway.limits.places import FairPlaces
from gateway.ops.metrics import ImageMetrics
from gateway.process.fair_room import Tenant

MAX_URLS = 32
"""Most URLs of one request."""
MAX_FETCHES = 64
"""Most fetches at a time in one gateway; more wait, within their time. A single busy key may use 51 of them."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


class _Room:
    """Bytes that the images of one request may still have, in the room of all requests."""

    def __init__(self, most: int, take: Take) -> None:
        self._most = self._left = most
        self._take = take

    def take(self, count: int) -> None:
        """Count bytes that are received. Raises :class:`ImageError` and :class:`Overloaded`."""
        self._left -= count
        if self._left < 0:
            raise ImageError("fetch", f"is one too many: the fetched images of a request have at most {self._most} bytes together")
        self._take(count)


class ImageFetcher:
    """Fetches the images of requests."""

    def __init__(
        self, hosts: Sequence[str], metrics: ImageMetrics, *, seconds: float, most_bytes: int, most_request_bytes: int
    ) -> None:
        """``hosts``: each ``HOST``, at the default ports of http and https, or ``HOST:PORT``. ``seconds``: for one image.
        ``most_bytes``: of one image. ``most_request_bytes``: of all images of a request."""
        self._hosts = {host.lower() for host in hosts}
        self._metrics = metrics
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._most_request_bytes = most_request_bytes
        self._places = FairPlaces(MAX_FETCHES)
        limits = httpx.Limits(max_connections=MAX_FETCHES, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits) if hosts else None

    def check(self, wanted: Mapping[str, str]) -> None:
        """Check the URLs of a request before anything is fetched. ``wanted``: the first field of the request with each URL. Raises
        :class:`InvalidImage`."""
        if len(wanted) > MAX_URLS:
            self._metrics.refused.labels("count").inc()
            raise InvalidImage(f"The request has {len(wanted)} URLs of images; at most {MAX_URLS} are fetched.", reason="count")
        for url, param in wanted.items():
            with self._naming(param):
                self._check(url)

    def _check(self, text: str) -> None:
        """Raise :class:`ImageError` for a URL that may not be fetched."""
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            raise ImageError("fetch", "has a URL that is not valid") from None
        if url.scheme not in _DEFAULT_PORTS:
            raise ImageError("host", "has a URL of another scheme than http and https")
        if not self._hosts:
            raise ImageError("host", "has a URL, and this server fetches none; send it as a data URL")
        if url.userinfo:
            raise ImageError("host", "has a URL with a user name; leave it out")
        host, default = url.raw_host.decode("ascii").lower(), _DEFAULT_PORTS[url.scheme]
        port = url.port or default
        if f"{host}:{port}" not in self._hosts and (port != default or host not in self._hosts):
            raise ImageError("host", "has a URL of a host that this server does not allow; send it as a data URL")

    async def fetch_all(self, wanted: Mapping[str, str], tenant: Tenant, take: Take) -> dict[str, bytes]:
        """Return the contents of several URLs that were checked. ``take``: called before bytes are kept. Raises
        :class:`InvalidImage` and what ``take`` does."""
        room = _Room(self._most_request_bytes, take)
        tasks = {url: asyncio.ensure_future(self._named(url, param, tenant, room)) for url, param in wanted.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {url: task.result() for url, task in tasks.items()}

    async def _named(self, url: str, param: str, tenant: Tenant, room: _Room) -> bytes:
        """:meth:`_fetch`, with an error that names the field ``param``."""
        began = time.perf_counter()
        with self._naming(param):
            content = await self._fetch(url, tenant, room)
        self._metrics.fetched("ok", time.perf_counter() - began)
        return content

    @contextmanager
    def _naming(self, param: str) -> Iterator[None]:
        """Count an :class:`ImageError` and turn it into an :class:`InvalidImage` of the field ``param``."""
        began = time.perf_counter()
        try:
            yield
        except ImageError as error:
            self._metrics.refused.labels(error.reason).inc()
            self._metrics.fetched(error.reason, time.perf_counter() - began)
            raise InvalidImage(f"`{param}`: the image {error}.", param=param, reason=error.reason) from None

    async def _fetch(self, url: str, tenant: Tenant, room: _Room) -> bytes:
        """Return the content of ``url``. Raises :class:`ImageError`."""
        assert self._transport is not None
        request = httpx.Request("GET", url, headers={"accept": "image/*", "accept-encoding": "identity"})
        try:
            async with asyncio.timeout(self._seconds):
                await self._places.take(tenant)
                try:
                    async with aclosing(await self._transport.handle_async_request(request)) as response:
                        return await self._content(response, room)
                finally:
                    self._places.give(tenant)
        except TimeoutError:
            raise ImageError("fetch", f"cannot be fetched within {self._seconds:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, OSError):
            raise ImageError("fetch", "cannot be fetched from its URL") from None

    async def _content(self, response: httpx.Response, room: _Room) -> bytes:
        """Read an answer. Raises :class:`ImageError` unless it is an image within the limit."""
        if response.status_code != 200:
            raise ImageError("fetch", f"cannot be fetched: its server answers with status {response.status_code}")
        if not response.headers.get("content-type", "").lower().startswith("image/"):
            raise ImageError("fetch", "cannot be used: its server says that it is no image (`Content-Type`)")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError("fetch", "cannot be used: its server compresses it (`Content-Encoding`)")
        length = response.headers.get("content-length", "")
        content, taken = bytearray(), 0
        if not (length.isdecimal() and int(length) > self._most_bytes):
            if length.isdecimal():  # at once, so that images that have begun get to their end
                taken = int(length)
                room.take(taken)
            async for part in response.aiter_raw():
                size = len(content) + len(part)
                if size > self._most_bytes:
                    break
                if size > taken:
                    room.take(size - taken)
                    taken = size
                content += part
            else:
                return bytes(content)
        raise ImageError("fetch", f"has more than {self._most_bytes} bytes")
