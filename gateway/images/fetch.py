"""Fetches images from URLs of clients.

A server that fetches what clients name can be turned against its own network (server-side request forgery). Therefore only hosts
of an allow-list are asked; a host is resolved once for each request, all its addresses must be public, and the connection goes to
one of the checked addresses, so that a resolver that changes its answer changes nothing. Redirects are followed through the same
checks, and not from https to http. Time, bytes, type and the number of fetches at a time are bounded. No cookies, credentials or
proxies are used.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx

from gateway.images.addresses import Resolver, is_public
from gateway.images.errors import ImageError, InvalidImage
from gateway.images.room import Take
from gateway.limits.places import FairPlaces
from gateway.metrics.images import ImageMetrics
from gateway.process.fair_room import Tenant

MAX_REDIRECTS = 3
MAX_URLS = 32
"""Most URLs of one request."""
MAX_FETCHES = 64
"""Most fetches at a time in one gateway; more wait, within their time. A single busy key may use 51 of them."""
MAX_ADDRESSES = 4
"""Most addresses of a host that are tried."""
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
        if not host or not any(_matches(entry, host, _port(url), url.scheme) for entry in self._entries):
            raise HostRefused("has a URL of a host that this server does not allow; send it as a data URL")


@dataclass(frozen=True)
class Names:
    """How the names of hosts become addresses."""

    resolver: Resolver
    allows: Callable[[str], bool] = is_public
    """Whether an address may be asked."""

    async def addresses(self, host: str, port: int, tenant: Tenant) -> Sequence[str]:
        """Return the addresses of ``host``. Raises :class:`HostRefused`, and :class:`ImageError` for a host without addresses."""
        try:
            addresses = await self.resolver.addresses(host, port, tenant)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise ImageError("fetch", "cannot be fetched: its host has no address")
        if not all(map(self.allows, addresses)):
            raise HostRefused("has a URL of a host whose address is not public")
        return addresses


class PinnedTransport(httpx.AsyncBaseTransport):
    """Sends a request to an address that was checked. Name and certificate stay those of the URL's host."""

    def __init__(self, inner: httpx.AsyncBaseTransport, names: Names, tenant: Tenant, *, seconds: float) -> None:
        """``seconds``: time of the whole fetch, of which each address has a part to connect."""
        self._inner = inner
        self._names = names
        self._tenant = tenant
        self._seconds = seconds

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` to the first address that can be connected to. Raises what :meth:`Names.addresses` does."""
        url = request.url
        host = url.raw_host.decode("ascii")
        *others, last = (await self._names.addresses(host.strip("[]"), _port(url), self._tenant))[:MAX_ADDRESSES]
        share = self._seconds / (len(others) + 2)
        for address in others:
            try:
                return await self._send(request, url.copy_with(host=address), host, share)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._send(request, url.copy_with(host=last), host, None)

    async def _send(self, request: httpx.Request, url: httpx.URL, host: str, seconds: float | None) -> httpx.Response:
        """``seconds``: longest time of connecting."""
        request.url = url
        request.extensions = {**request.extensions, "sni_hostname": host, "timeout": {"connect": seconds}}
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


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
        self,
        hosts: Sequence[str],
        metrics: ImageMetrics,
        *,
        seconds: float,
        most_bytes: int,
        most_request_bytes: int,
        names: Names | None = None,
    ) -> None:
        """``hosts``: see :class:`AllowedHosts`. ``seconds``: for one image with all redirects. ``most_bytes``: of one image.
        ``most_request_bytes``: of all images of a request."""
        self._hosts = AllowedHosts(hosts)
        self._metrics = metrics
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._most_request_bytes = most_request_bytes
        self._names = names or Names(Resolver())
        self._places = FairPlaces(MAX_FETCHES)
        self._context: asyncio.Task[ssl.SSLContext] | None = None

    def check(self, wanted: Mapping[str, str]) -> None:
        """Check the URLs of a request before anything is fetched. ``wanted``: the first field of the request with each URL. Raises
        :class:`InvalidImage`."""
        if len(wanted) > MAX_URLS:
            self._metrics.refused("count")
            raise InvalidImage(f"The request has {len(wanted)} URLs of images; at most {MAX_URLS} are fetched.", reason="count")
        for url, param in wanted.items():
            with self._naming(param):
                self._hosts.check(_parsed(url))

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
            self._metrics.refused(error.reason)
            self._metrics.fetched(error.reason, time.perf_counter() - began)
            raise InvalidImage(f"`{param}`: the image {error}.", param=param, reason=error.reason) from None

    async def _fetch(self, url: str, tenant: Tenant, room: _Room) -> bytes:
        """Return the content of ``url``. Raises :class:`ImageError`."""
        try:
            async with asyncio.timeout(self._seconds), self._place(tenant):
                return await self._follow(_parsed(url), tenant, room)
        except TimeoutError:
            raise ImageError("fetch", f"cannot be fetched within {self._seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError):
            raise ImageError("fetch", "cannot be fetched from its URL") from None

    @asynccontextmanager
    async def _place(self, tenant: Tenant) -> AsyncIterator[None]:
        await self._places.take(tenant)
        try:
            yield
        finally:
            self._places.give(tenant)

    async def _follow(self, target: httpx.URL, tenant: Tenant, room: _Room) -> bytes:
        """Fetch ``target``, and what it redirects to."""
        async with PinnedTransport(await self._transport(), self._names, tenant, seconds=self._seconds) as transport:
            for _ in range(MAX_REDIRECTS + 1):
                self._hosts.check(target)
                request = httpx.Request("GET", target, headers={"accept": "image/*", "accept-encoding": "identity"})
                response = await transport.handle_async_request(request)
                async with aclosing(response):
                    if response.status_code not in _REDIRECTS:
                        return await self._content(response, room)
                    before, target = target.scheme, target.join(response.headers.get("location", ""))
                    if before == "https" and target.scheme == "http":
                        raise ImageError("fetch", "cannot be fetched: its server redirects from https to http")
        raise ImageError("fetch", f"cannot be fetched: more than {MAX_REDIRECTS} redirects")

    async def _transport(self) -> httpx.AsyncHTTPTransport:
        """Return a transport for one fetch: connections to one address with different names are never shared."""
        if self._context is None:  # loading the authorities takes tens of milliseconds
            self._context = asyncio.create_task(asyncio.to_thread(httpx.create_ssl_context, trust_env=False))
        context = await asyncio.shield(self._context)
        return httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

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


def _parsed(url: str) -> httpx.URL:
    """Raises :class:`ImageError`."""
    try:
        return httpx.URL(url)
    except httpx.InvalidURL:
        raise ImageError("fetch", "has a URL that is not valid") from None


def _port(url: httpx.URL) -> int:
    return url.port or _DEFAULT_PORTS[url.scheme]


def _matches(entry: str, host: str, port: int, scheme: str) -> bool:
    name, _, named_port = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
    if port != (int(named_port) if named_port else _DEFAULT_PORTS[scheme]):
        return False
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]) and len(host) > len(name) - 1)
