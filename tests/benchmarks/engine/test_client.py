"""The load: Poisson, open loop, honest about failures."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmarks.engine.load import Job, Workload, drive, summarise

WORKLOAD = Workload(query=4, item=3, items=4)


@asynccontextmanager
async def served(handler):
    """The URL of a server whose ``/v1/score`` is ``handler``."""
    app = web.Application()
    app.router.add_post("/v1/score", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    await runner.cleanup()


def job(url: str, arrivals: list[float], **options) -> Job:
    return Job(url=url, arrivals=arrivals, vocab_size=1000, workload=WORKLOAD, **options)


def scored(count: int = WORKLOAD.items) -> web.Response:
    return web.json_response({"scores": [[0.5, 0.5]] * count})


async def test_requests_do_not_wait_for_answers():
    """Every answer takes longer than all arrivals together: all requests are in flight at once, each sent at its time."""
    open_now, most = 0, 0

    async def slow(_: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.8)
        open_now -= 1
        return scored()

    arrivals = [place * 0.02 for place in range(20)]
    async with served(slow) as url:
        samples = await drive(job(url, arrivals))
    assert most == 20
    assert [sample.outcome for sample in samples] == ["ok"] * 20
    assert [sample.scheduled for sample in samples] == arrivals
    assert all(sample.sent >= sample.scheduled for sample in samples)
    assert max(sample.latency for sample in samples) < 2.0


@pytest.mark.slow
async def test_failures_are_counted_by_kind():
    answers = [scored(), web.json_response({}, status=429), scored(WORKLOAD.items - 1), None, "silence"]

    async def mixed(request: web.Request) -> web.Response:
        answer = answers.pop(0)
        if answer == "silence":
            await asyncio.sleep(5)
        if not isinstance(answer, web.Response):
            request.transport.close()
            return scored()
        return answer

    async with served(mixed) as url:
        samples = await drive(job(url, [0.0, 0.1, 0.2, 0.3, 0.4], timeout_seconds=0.5))
    assert [sample.outcome for sample in samples] == ["ok", "http 429", "wrong", "lost", "timeout"]
    summary = summarise(samples)
    assert summary["failures"] == {"http 429": 1, "lost": 1, "timeout": 1, "wrong": 1}
    assert summary["items_per_s"] == pytest.approx(4 / samples[-1].done)
