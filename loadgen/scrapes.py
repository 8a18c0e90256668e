"""Reads pages of Prometheus metrics before, during and after a run. Pages are parsed afterwards, as that would delay requests."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from yardstick_llm.loadgen.records import Scrape

PAGE_BYTES = 4 << 20
KEPT_BYTES = 64 << 20
MOST_SERIES = 5000
"""Bounds on one page, on all pages of a run, and on the series of a page that are kept."""
_MOST_READS = 120
_SECONDS = 5.0
"""Shortest time between two reads of a page."""
_TIMEOUT = 2.0
"""Seconds for one read of a page."""
EACH = "dns+"
"""In front of a URL: read the page of every address of its host name."""


async def addresses(host: str) -> list[str]:
    """The addresses of a host name. Raises :class:`OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class Scraper:
    """Reads the pages in ``urls``, without the API key. :meth:`results` has what was read."""

    def __init__(
        self,
        urls: Sequence[str],
        duration_s: float,
        clock: Callable[[], float],
        resolve: Callable[[str], Awaitable[Sequence[str]]] = addresses,
    ) -> None:
        self._urls = urls
        self._resolve = resolve
        self._pause = max(_SECONDS, duration_s / _MOST_READS)
        self._clock = clock
        self._pages: list[tuple[str, float, bytes | str]] = []
        """URL, time, and the page or the error."""
        self._bytes = 0

    async def read(self, now: float | None = None) -> None:
        """Read every page once. Raises nothing for a page that cannot be read. ``now``: the time to record, if not the clock's."""
        if self._urls:
            time = self._clock() if now is None else now
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT)) as session:
                found = await asyncio.gather(*(self._pages_of(url, time) for url in self._urls))
                await asyncio.gather(*(self._read(session, url, time) for urls in found for url in urls))

    async def follow(self) -> None:
        """Read the pages regularly, until cancelled."""
        while self._bytes < KEPT_BYTES:
            await asyncio.sleep(self._pause)
            await self.read()

    async def _pages_of(self, url: str, now: float) -> list[str]:
        """The URLs to read for an entry. Names are looked up each time, because pods come and go."""
        if not url.startswith(EACH):
            return [url]
        parts = urlsplit(url.removeprefix(EACH))
        port = f":{parts.port}" if parts.port else ""
        try:
            async with asyncio.timeout(_TIMEOUT):
                found = await self._resolve(parts.hostname or "")
        except OSError as error:  # includes TimeoutError
            self._pages.append((url, now, str(error) or "the name was not found in time"))
            return []
        hosts = [f"[{address}]" if ":" in address else address for address in found]
        return [parts._replace(netloc=f"{host}{port}").geturl() for host in hosts]

    async def _read(self, session: aiohttp.ClientSession, url: str, now: float) -> None:
        found = b""
        try:
            async with session.get(url) as response:
                response.raise_for_status()
                async for chunk in response.content.iter_any():
                    found += chunk
                    if len(found) > PAGE_BYTES:
                        raise ValueError(f"more than {PAGE_BYTES >> 20} MiB")
        except aiohttp.ClientResponseError as error:
            self._pages.append((url, now, f"status {error.status}"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._pages.append((url, now, str(error) or "no answer in time"))
        else:
            self._bytes += len(found)
            self._pages.append((url, now, found))

    def results(self) -> list[Scrape]:
        """Parse the pages, in the order of reading."""
        return [Scrape(url, now, error=page) if isinstance(page, str) else parse(url, now, page) for url, now, page in self._pages]


def parse(url: str, now: float, page: bytes) -> Scrape:
    """Parse one page. Buckets and times of creation are left out."""
    found = Scrape(url, now, {}, {})
    try:
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")) or not math.isfinite(sample.value):
                    continue
                values = found.gauges if family.type == "gauge" else found.counters
                if len(found.counters) + len(found.gauges) >= MOST_SERIES:
                    return found
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    except ValueError as error:  # includes UnicodeDecodeError
        return Scrape(url, now, error=f"not in Prometheus's text format: {str(error)[:100]}")
    return found
