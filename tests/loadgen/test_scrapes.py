"""Metrics of servers beside a run: what is computed from them, and pages that cannot be read."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from tests.loadgen.servers import Request, answer, scores, serving
from yardstick_llm.loadgen import scrapes
from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.records import Run, Scrape
from yardstick_llm.loadgen.runner import run
from yardstick_llm.loadgen.scenario import load
from yardstick_llm.loadgen.scrapes import parse
from yardstick_llm.loadgen.statistics import Series, summarise

PAGE = """
# TYPE yardstick_tokens counter
yardstick_tokens_total{model="a",kind="prompt"} %d
yardstick_tokens_created 5
# TYPE yardstick_engine_wait_seconds histogram
yardstick_engine_wait_seconds_bucket{le="0.1"} 1
yardstick_engine_wait_seconds_bucket{le="+Inf"} %d
yardstick_engine_wait_seconds_count %d
yardstick_engine_wait_seconds_sum %f
# TYPE yardstick_requests_in_flight gauge
yardstick_requests_in_flight %d
# TYPE yardstick_uploads gauge
yardstick_uploads 0
# TYPE yardstick_ejections counter
yardstick_ejections_total 7
"""
TOKENS = 'yardstick_tokens_total{kind="prompt",model="a"}'


def reads(*rows: tuple[int, int, float, int], url: str = "u") -> list[Scrape]:
    return [
        parse(url, place, (PAGE % (tokens, count, count, total, flying)).encode())
        for place, (tokens, count, total, flying) in enumerate(rows)
    ]


def test_increases_means_and_gauges() -> None:
    found = summarise(reads((100, 10, 1.0, 0), (150, 14, 2.0, 6), (180, 14, 2.0, 3)))
    assert found == [
        Series("u", TOKENS, "counter", 80),
        Series("u", "yardstick_engine_wait_seconds", "mean", 0.25, count=4),
        Series("u", "yardstick_requests_in_flight", "gauge", 3, 6),
    ]
    restarted = summarise(reads((100, 10, 1.0, 0), (150, 10, 1.0, 0), (20, 2, 0.5, 0)))
    assert [series.value for series in restarted] == [70, 0.25], "a server that started again counts from zero"
    two = reads((0, 0, 0, 0), (5, 0, 0, 0)) + reads((0, 0, 0, 0), (9, 0, 0, 0), url="v")
    assert [(series.url, series.value) for series in summarise(two)] == [("u", 5), ("v", 9)]
    assert summarise([]) == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.loadgen.client._undisturbed", nullcontext)
    monkeypatch.setattr(scrapes, "PAGE_BYTES", 2000)
    monkeypatch.setattr(scrapes, "_SECONDS", 0.2)


@pytest.mark.usefixtures("small")
def test_a_run_reads_pages_and_survives_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "_SECONDS", 0.1)
    seen: list[Any] = []

    async def server(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/score":
            answer(writer, scores(request))
        elif request.path == "/metrics":
            seen.append(request.headers.get("authorization"))
            answer(writer, (PAGE % (10 * len(seen), 1, 1, 1.0, 1)).encode())
        elif request.path == "/huge":
            answer(writer, b"a" * 3000)
        elif request.path == "/odd":
            answer(writer, b'a{b="c} 1\n')
        else:
            answer(writer, b"", "404 Not Found")

    with serving(server) as url:
        pages = [f"{url}/metrics", f"{url}/huge", f"{url}/odd", f"{url}/none", "http://127.0.0.1:9/metrics"]
        told = ", ".join(f'"{page}"' for page in pages)
        settings = (f"target.url={url}", f"target.metrics=[{told}]", "arrivals.rate=20", "duration_s=0.5")
        done: Run = run(load(None, settings), Share(), "secret", "test", None)
        assert all(record.failure is None for record in done.records)
        by_page = [[scrape for scrape in done.scrapes if scrape.url == page] for page in pages]
        assert all(len(found) >= 4 for found in by_page), "at the start, twice or more during the run, and at its end"
        good, *bad = by_page
        assert [scrape.error for scrape in good] == [""] * len(good)
        assert good[0].time == 0
        assert summarise(done.scrapes)[0].value == 10 * (len(seen) - 1)
        assert set(seen) == {None}, "the key is for the API only"
        for found, says in zip(bad, ("more than", "not in Prometheus's text format", "status 404", ""), strict=True):
            assert found
            assert all(says in scrape.error and scrape.error for scrape in found)
        second = run(load(None, settings), Share(1, 2), None, "test", None)
        assert second.scrapes == [], "the first worker reads for all"


async def test_each_address_of_a_name_is_read() -> None:
    """As of a headless Service, whose pods come and go during a run."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer(writer, b"# TYPE a gauge\na 1\n", connection="close")
        await writer.drain()
        writer.close()

    found: list[list[str]] = [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], []]

    async def resolve(host: str) -> list[str]:
        assert host == "yardstick-pods"
        if not (addresses := found.pop(0)):
            raise OSError("Name or service not known")
        return addresses

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as first:
        port = first.sockets[0].getsockname()[1]
        async with await asyncio.start_server(connected, "127.0.0.2", port):
            entry = f"dns+http://yardstick-pods:{port}/metrics"
            scraper = scrapes.Scraper([entry], 1.0, lambda: 0.0, resolve)
            for time in range(3):
                await scraper.read(float(time))
    read = [(scrape.time, scrape.url, scrape.gauges, scrape.error) for scrape in scraper.results()]
    one, two = (f"http://127.0.0.{place}:{port}/metrics" for place in (1, 2))
    assert sorted(read) == [
        (0.0, one, {"a": 1.0}, ""),
        (1.0, one, {"a": 1.0}, ""),
        (1.0, two, {"a": 1.0}, ""),
        (2.0, entry, {}, "Name or service not known"),
    ]
    assert await scrapes.addresses("127.0.0.1") == ["127.0.0.1"]


def test_urls_are_checked() -> None:
    assert load(None, ['target.metrics=["dns+http://a:8000/metrics"]']).target.metrics == ("dns+http://a:8000/metrics",)
    for url in ("gateway/metrics", "http://me:secret@a/metrics", "http://a", "dns+https://a/metrics"):
        with pytest.raises(LoadError, match="`metrics` has a URL") as raised:
            load(None, [f'target.metrics=["{url}"]'])
        assert "secret" not in str(raised.value)
