"""Images of URLs, fetched from hosts that the operator lists, and room for the images of all requests.

A server that fetches what clients name can be turned against its own network (server-side request forgery). So no other host is
asked, redirects are not followed, and no cookies, credentials or proxies are used. Time, bytes, type and the number of fetches at a
time are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

import httpx

from yardstick_llm.gateway.errors import BodyTooLarge, Overloaded
from yardstick_llm.gateway.http.context import RequestContext
from yardstick_llm.gateway.images.decode import ImageError, InvalidImage
from yardstick_llm.gateway.ops.metrics import ImageMetrics
from yardstick_llm.gateway.process.bounds import FairRoom, Tenant
from yardstick_llm.gateway.process.event_loop import end_tasks

MAX_URLS = 32
"""Most URLs of one request."""
MAX_FETCHES = 256
"""Most fetches at a time in one gateway. A single busy key may use four fifths of them."""
_DEFAULT_PORTS = {"http": 80, "https": 443}

Take = Callable[[int], None]
"""Takes room for more bytes, by their number. Raises :class:`Overloaded`, :class:`BodyTooLarge`."""


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
        self._fetches = FairRoom(MAX_FETCHES)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)

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
        :class:`InvalidImage`, :class:`Overloaded` and what ``take`` does."""
        if not self._fetches.take(tenant.id, len(wanted), tenant.weight):
            raise Overloaded("The server fetches too many images at the moment; try again soon.", retry_after=1)
        most = left = self._most_request_bytes

        def count(amount: int) -> None:
            nonlocal left
            left -= amount
            if left < 0:
                raise ImageError("fetch", f"is one too many: the fetched images of a request have at most {most} bytes together")
            take(amount)

        tasks = {url: asyncio.create_task(self._fetch(url, param, count)) for url, param in wanted.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            await end_tasks(*tasks.values())
            self._fetches.give(tenant.id, len(wanted))
        return {url: task.result() for url, task in tasks.items()}

    async def _fetch(self, url: str, param: str, take: Take) -> bytes:
        """Return the content of ``url``, which the field ``param`` names. Raises :class:`InvalidImage`."""
        began = time.perf_counter()
        request = httpx.Request("GET", url, headers={"accept": "image/*", "accept-encoding": "identity"})
        with self._naming(param):
            try:
                async with (
                    asyncio.timeout(self._seconds),
                    aclosing(await self._transport.handle_async_request(request)) as response,
                ):
                    content = await self._content(response, take)
            except TimeoutError:
                raise ImageError("fetch", f"cannot be fetched within {self._seconds:g} s") from None
            except (httpx.HTTPError, httpx.StreamError, OSError):
                raise ImageError("fetch", "cannot be fetched from its URL") from None
        self._metrics.fetched("ok", time.perf_counter() - began)
        return content

    async def _content(self, response: httpx.Response, take: Take) -> bytes:
        """Read an answer. Raises :class:`ImageError` unless it is an image within the limit."""
        if response.status_code != 200:
            raise ImageError("fetch", f"cannot be fetched: its server answers with status {response.status_code}")
        if not response.headers.get("content-type", "").lower().startswith("image/"):
            raise ImageError("fetch", "cannot be used: its server says that it is no image (`Content-Type`)")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError("fetch", "cannot be used: its server compresses it (`Content-Encoding`)")
        length = response.headers.get("content-length", "")
        size = taken = int(length[:20]) if length.isdecimal() else 0
        content = bytearray()
        if size <= self._most_bytes:
            take(size)  # at once, so that images that have begun get to their end
            async for part in response.aiter_raw():
                size = len(content) + len(part)
                if size > self._most_bytes:
                    break
                if size > taken:
                    take(size - taken)
                    taken = size
                content += part
        if size > self._most_bytes:
            raise ImageError("fetch", f"has more than {self._most_bytes} bytes")
        return bytes(content)

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


class ImageRoom:
    """Bounds the bytes of images that the gateway holds, fairly between keys: files that are fetched for a small request, and
    pixels, which a small file may have many of and which stay until the request ends, because another engine may need them."""

    def __init__(self, capacity: int, metrics: ImageMetrics) -> None:
        """``capacity``: in bytes."""
        self._room = FairRoom(capacity)
        self._metrics = metrics
        metrics.held.set_function(lambda: self._room.used)

    def hold(self, context: RequestContext, amount: int) -> None:
        """Take room for ``amount`` bytes until the end of the request. Raises :class:`Overloaded`, :class:`BodyTooLarge`."""
        tenant = context.tenant
        self._take(tenant, amount, amount)
        context.at_end.append(lambda: self._room.give(tenant.id, amount))

    @contextmanager
    def receiving(self, tenant: Tenant) -> Iterator[Take]:
        """Room for files that are received and used within the block."""
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            self._take(tenant, amount, held + amount)
            held += amount

        try:
            yield take
        finally:
            if held:
                self._room.give(tenant.id, held)

    def _take(self, tenant: Tenant, amount: int, whole: int) -> None:
        """``whole``: what the request holds with ``amount``."""
        if not self._room.take(tenant.id, amount, tenant.weight):
            self._metrics.refused.labels("room").inc()
            most = self._room.most(tenant.id, tenant.weight)
            if whole > most:
                raise BodyTooLarge(f"The request's images have more than the {most} bytes that one caller may have in progress.")
            raise Overloaded("The server holds too many images at the moment; try again soon.", retry_after=1)
