"""Fetches images from URLs of clients.

A server that fetches what clients name can be turned against its own network (server-side request forgery). Therefore only hosts
of an allow-list are asked; a host is resolved once for each request, all its addresses must be public, and the connection goes to
one of the checked addresses, so that a resolver that changes its answer changes nothing. Redirects are followed through the same
checks. Time, bytes, type and the number of fetches at a time are bounded. No cookies, credentials or proxies are used.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

import httpx

from gateway.images.addresses import Resolve, is_public, resolve
from gateway.images.errors import ImageError, InvalidImage
from gateway.metrics.images import ImageMetrics

MAX_REDIRECTS = 3
MAX_URLS = 32
"""Most URLs of one request."""
MAX_FETCHES = 32
"""Most fetches at a time in one gateway; more wait, within their time."""
_REDIRECTS = {301, 302, 303, 307, 308}
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HostRefused(ImageError):
    """The host of a URL is not allowed, or has an address that is not public."""

    def __init__(self, message: str) -> None:
        super().__init__("host", message)


class AllowedHosts:
    """The allow-list. An entry is ``HOST``, ``HOST:PORT``, ``*.DOMAIN`` for all names below a domain, or ``*`` for all hosts. An
    entry without a port allows the default ports of http and https."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [entry.lower() for entry in entries]

    def check(self, url: httpx.URL) -> None:
        """Raise :class:`HostRefused` unless ``url`` may be fetched."""
        if url.scheme not in _DEFAULT_PORTS:
            raise HostRefused("has a URL of another scheme than http and https")
        if not self._entries:
            raise HostRefused("has a URL, and this server fetches none; send it as a data URL")
        if url.userinfo:
            raise HostRefused("has a URL with a user name; leave it out")
        host = url.raw_host.decode("ascii", "replace").lower()
        port = None if url.port is None or url.port == _DEFAULT_PORTS[url.scheme] else url.port
        if not host or not any(_matches(entry, host, port) for entry in self._entries):
            raise HostRefused("has a URL of a host that this server does not allow; send it as a data URL")


class PinnedTransport(httpx.AsyncBaseTransport):
    """Sends a request to an address that was checked. Name and certificate stay those of the URL's host."""

    def __init__(self, inner: httpx.AsyncBaseTransport, resolve: Resolve, allows: Callable[[str], bool]) -> None:
        self._inner = inner
        self._resolve = resolve
        self._allows = allows

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``. Raises :class:`HostRefused`, and :class:`ImageError` for a host without addresses."""
        url = request.url
        host = url.raw_host.decode("ascii")
        try:
            addresses = await self._resolve(host.strip("[]"), url.port or _DEFAULT_PORTS[url.scheme])
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise ImageError("fetch", "cannot be fetched: its host has no address")
        if not all(map(self._allows, addresses)):
            raise HostRefused("has a URL of a host whose address is not public")
        request.url = url.copy_with(host=addresses[0])
        request.extensions = {**request.extensions, "sni_hostname": host}
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _Room:
    """Bytes that the images of one request may still have."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        """Count received bytes. Raises :class:`ImageError`."""
        self._left -= count
        if self._left < 0:
            raise ImageError("fetch", f"is one too many: the fetched images of a request have at most {self._most} bytes together")


class ImageFetcher:
    """Fetches the images of requests."""

    def __init__(
        self,
        hosts: Sequence[str],
        metrics: ImageMetrics,
        *,
        seconds: float,
        most_bytes: int,
        most_request_bytes: int,
        resolve: Resolve = resolve,
        allows: Callable[[str], bool] = is_public,
    ) -> None:
        """``hosts``: see :class:`AllowedHosts`. ``seconds``: for one image with all redirects. ``most_bytes``: of one image.
        ``most_request_bytes``: of all images of a request. ``resolve`` and ``allows``: how hosts are resolved, and which addresses
        are asked."""
        self._hosts = AllowedHosts(hosts)
        self._metrics = metrics
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._most_request_bytes = most_request_bytes
        self._pinned = (resolve, allows)
        self._places = asyncio.Semaphore(MAX_FETCHES)
        self._context: ssl.SSLContext | None = None

    async def fetch_all(self, wanted: Mapping[str, str]) -> dict[str, bytes]:
        """Return the contents of several URLs. ``wanted``: the first field of the request with each URL. Raises
        :class:`InvalidImage`."""
        if len(wanted) > MAX_URLS:
            raise InvalidImage(f"The request has {len(wanted)} URLs of images; at most {MAX_URLS} are fetched.", reason="count")
        room = _Room(self._most_request_bytes)
        tasks = {url: asyncio.ensure_future(self._named(url, param, room)) for url, param in wanted.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {url: task.result() for url, task in tasks.items()}

    async def _named(self, url: str, param: str, room: _Room) -> bytes:
        """:meth:`fetch`, with an error that names the field ``param``."""
        began = time.perf_counter()
        try:
            content = await self.fetch(url, room)
        except ImageError as error:
            self._metrics.refused(error.reason)
            self._metrics.fetched(error.reason, time.perf_counter() - began)
            raise InvalidImage(f"`{param}`: the image {error}.", param=param, reason=error.reason) from None
        self._metrics.fetched("ok", time.perf_counter() - began)
        return content

    async def fetch(self, url: str, room: _Room | None = None) -> bytes:
        """Return the content of ``url``. ``room``: for the images of one request. Raises :class:`ImageError`."""
        try:
            async with asyncio.timeout(self._seconds), self._places:
                return await self._follow(url, room or _Room(self._most_request_bytes))
        except TimeoutError:
            raise ImageError("fetch", f"cannot be fetched within {self._seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError):
            raise ImageError("fetch", "cannot be fetched from its URL") from None

    async def _follow(self, url: str, room: _Room) -> bytes:
        """Fetch ``url``, and what it redirects to."""
        target = httpx.URL(url)
        self._hosts.check(target)
        async with PinnedTransport(await self._transport(), *self._pinned) as transport:
            for _ in range(MAX_REDIRECTS + 1):
                self._hosts.check(target)
                request = httpx.Request("GET", target, headers={"accept": "image/*", "accept-encoding": "identity"})
                response = await transport.handle_async_request(request)
                async with aclosing(response):
                    if response.status_code not in _REDIRECTS:
                        return await self._content(response, room)
                    target = target.join(response.headers.get("location", ""))
        raise ImageError("fetch", f"cannot be fetched: more than {MAX_REDIRECTS} redirects")

    async def _transport(self) -> httpx.AsyncHTTPTransport:
        """Return a transport for one fetch: connections to one address with different names are never shared."""
        if self._context is None:  # loading the authorities takes tens of milliseconds
            self._context = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
        return httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    async def _content(self, response: httpx.Response, room: _Room) -> bytes:
        """Read an answer. Raises :class:`ImageError` unless it is an image within the limit."""
        if response.status_code != 200:
            raise ImageError("fetch", f"cannot be fetched: its server answers with status {response.status_code}")
        if not response.headers.get("content-type", "").lower().startswith("image/"):
            raise ImageError("fetch", "cannot be used: its server says that it is no image (`Content-Type`)")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError("fetch", "cannot be used: its server compresses it (`Content-Encoding`)")
        length = response.headers.get("content-length", "")
        content = bytearray()
        if not (length.isdecimal() and int(length) > self._most_bytes):
            async for part in response.aiter_raw():
                content += part
                room.take(len(part))
                if len(content) > self._most_bytes:
                    break
            else:
                return bytes(content)
        raise ImageError("fetch", f"has more than {self._most_bytes} bytes")


def _matches(entry: str, host: str, port: int | None) -> bool:
    name, _, named_port = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
    if (int(named_port) if named_port.isdecimal() else None) != port:
        return False
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]) and len(host) > len(name) - 1)
