"""Reads pages of Prometheus metrics before, during and after a run. Pages are parsed afterwards, as that would delay requests.

What reads and parses pages is imported where it is used: the process that makes requests imports this module too.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    import aiohttp

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
            import aiohttp

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
        import aiohttp

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
    from prometheus_client.parser import text_string_to_metric_families

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


class Series(msgspec.Struct):
    """Values of one series of one page during a run."""

    url: str
    name: str
    kind: str
    """``counter``, ``mean`` (of a histogram or summary) or ``gauge``."""
    value: float
    """Increase of a counter, mean of the histogram's new values, or mean of a gauge over the reads."""
    most: float | None = None
    """Largest value of a gauge."""
    count: int | None = None
    """Number of the histogram's new values."""


def summarise(scrapes: Sequence[Scrape]) -> list[Series]:
    """Return each series that was not zero throughout. A counter that falls was reset: its server has started again."""
    pages: dict[str, list[Scrape]] = defaultdict(list)
    for scrape in scrapes:
        if not scrape.error:
            pages[scrape.url].append(scrape)
    found: list[Series] = []
    for url, reads in pages.items():
        increases = {name: _increase([read.counters.get(name, 0.0) for read in reads]) for name in reads[-1].counters}
        for name, increase in increases.items():
            base, brace, labels = name.partition("{")
            count = increases.get(f"{base.removesuffix('_sum')}_count{brace}{labels}") if base.endswith("_sum") else None
            if count:
                found.append(Series(url, base.removesuffix("_sum") + brace + labels, "mean", increase / count, count=round(count)))
            elif increase and not (base.endswith("_count") and f"{base.removesuffix('_count')}_sum{brace}{labels}" in increases):
                found.append(Series(url, name, "counter", increase))
        for name in reads[-1].gauges:
            values = [read.gauges[name] for read in reads if name in read.gauges]
            if any(values):
                found.append(Series(url, name, "gauge", math.fsum(values) / len(values), max(values)))
    return found


def _increase(values: Sequence[float]) -> float:
    return math.fsum(new - old if new >= old else new for old, new in pairwise(values))
