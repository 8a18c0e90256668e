"""Worker processes that read requests: forked, killed, replaced, and shared fairly."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import EOS, TEMPLATE, ids, library
from tests.processes import until
from tests.warm import as_in_production
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.errors import Overloaded
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.requests.worker import FIRST_BYTES, receive
from yardstick_llm.gateway.text.prepared import Bounds, Facts, Packed, unpack
from yardstick_llm.gateway.text.vocabulary import TokenizerError
from yardstick_llm.gateway.workers.messages import HEADER, Answer, Broken, Read, Refused
from yardstick_llm.gateway.workers.queue import LEAST_COST, SECONDS_PER_BYTE, Capacity, JobQueue, QueuedJob
from yardstick_llm.gateway.workers.workers import BULK, GRACE_SECONDS, Forks, WorkerLostError, Workers

FILES = TokenizerFiles(library().to_str().encode(), TEMPLATE, {"eos_token": EOS})
SCORE = msgspec.json.encode({"query": "red shoes, ", "items": ["blue", "red"], "label_token_ids": [1]})
FACTS = Facts("m", 10**9, 320, 16)
SLOW = msgspec.json.encode({"query": "x" * 20_000, "items": [str(i) for i in range(3000)], "label_token_ids": [1]})
"""A minute of tokenising, which no limit of seconds below comes near."""
UNBOUND = Bounds(max_request_characters=10**12, max_request_tokens=10**9)


@pytest.fixture
def in_production() -> Iterator[None]:
    """The fork server imports its modules itself, so its memory is only its own."""
    with as_in_production():
        yield


@asynccontextmanager
async def running(workers: int = 2, **capacity: Any) -> AsyncIterator[tuple[Workers, str]]:
    """Workers that know one model, and its key."""
    options = {"job_mib": 256, "max_jobs": 100, "max_bytes": 1 << 30} | capacity
    started = Workers(Capacity(workers, **options), Telemetry())
    started.start()
    try:
        key, vocabulary = await started.load(FILES)
        yield started, key
        del vocabulary
    finally:
        await started.stop()


async def ask(workers: Workers, key: str, body: bytes = SCORE, *, tenant: str = "a", seconds: float = 20.0) -> Answer:
    async with workers.job(tenant=tenant, size=len(body), bulk=False) as channel:
        return await channel.ask(Read("score", key, FACTS, UNBOUND), [body], seconds=seconds)


def children(pid: int) -> list[int]:
    return [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]


async def is_right(answer: Answer) -> bool:
    assert isinstance(answer, Packed), answer
    prepared = await unpack(answer)
    texts = [[*prepared.prefix, *row] for row in prepared.rows]
    return texts == [ids("red shoes, blue"), ids("red shoes, red")]


@pytest.mark.usefixtures("in_production")
async def test_a_job_is_read_and_the_vocabulary_is_known() -> None:
    async with running() as (workers, key):
        assert await is_right(await ask(workers, key))
        refused = await ask(workers, key, b'{"query": 1}')
        assert isinstance(refused, Refused)
        assert refused.param == "query"
        assert await is_right(await ask(workers, key))


async def test_the_same_files_are_read_once_and_forgotten_with_their_last_user() -> None:
    async with running() as (workers, key):
        again, vocabulary = await workers.load(FILES)
        assert again == key
        other, second = await workers.load(msgspec.structs.replace(FILES, chat_template="x"))
        assert other != key
        assert second is not vocabulary
        assert await is_right(await ask(workers, other))
        del second
        gc.collect()
        await until(lambda: other not in workers._files)
        assert await is_right(await ask(workers, key))


async def test_files_that_are_read_twice_at_once_stay_known() -> None:
    workers = Workers(Capacity(1, job_mib=256, max_jobs=10, max_bytes=1 << 30), Telemetry())
    workers.start()
    try:
        (key, vocabulary), (_, other) = await asyncio.gather(workers.load(FILES), workers.load(FILES))
        assert vocabulary is other
        del other
        gc.collect()
        await asyncio.sleep(0.1)
        assert isinstance(await ask(workers, key), Packed)
    finally:
        await workers.stop()


async def test_files_that_cannot_be_used_are_a_typed_error() -> None:
    async with running() as (workers, key):
        for content in (b"{", b"", b'{"model": 3}'):
            with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
                await workers.load(msgspec.structs.replace(FILES, tokenizer_json=content))
        assert await is_right(await ask(workers, key))


async def test_a_killed_worker_is_replaced() -> None:
    async with running() as (workers, key):
        await until(lambda: len(workers._idle) == 2)
        for channel in list(workers._idle):
            os.kill(channel.pid, signal.SIGKILL)
        await until(lambda: not workers._idle or all(channel.answered == 0 for channel in workers._idle))
        await asyncio.sleep(1)
        assert await is_right(await ask(workers, key))


@pytest.mark.slow
async def test_a_worker_that_ends_before_its_job_is_sent_is_reported_at_once() -> None:
    async with running() as (workers, key), workers.job(tenant="a", size=1, bulk=False) as channel:
        channel.ended(signal.SIGKILL)
        for _ in range(2):  # before and after the event loop reports the end of the connection
            with pytest.raises(WorkerLostError):
                async with asyncio.timeout(2):
                    await channel.ask(Read("score", key, FACTS, UNBOUND), [SCORE], seconds=20)
            await channel.gone


@pytest.mark.slow
@pytest.mark.usefixtures("in_production")
async def test_a_killed_fork_server_is_replaced_with_all_it_knew() -> None:
    async with running() as (workers, key):
        assert workers._forks
        old = workers._forks._process.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: workers._forks is not None and workers._forks._process.pid != old and workers._idle)
        assert await is_right(await ask(workers, key))


async def test_workers_need_no_room_on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "lost"))
    async with running(1) as (workers, key):
        assert await is_right(await ask(workers, key))


async def test_a_fork_server_that_cannot_be_used_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(1) as (workers, key):
        assert workers._forks
        load, failed = Forks.load, []

        async def failing(forks: Forks, *given: Any) -> Any:
            failed.append(forks._process.pid)
            if len(failed) == 1:
                raise OSError("no room")
            return await load(forks, *given)

        monkeypatch.setattr(Forks, "load", failing)
        os.kill(workers._forks._process.pid, signal.SIGKILL)
        await until(lambda: len(failed) == 2 and workers._idle, 20)
        assert not _runs(failed[0])
        assert await is_right(await ask(workers, key))


async def test_a_job_over_its_time_is_killed_and_says_so() -> None:
    async with running(1) as (workers, key):
        began = time.monotonic()
        with pytest.raises(WorkerLostError) as caught:
            await ask(workers, key, SLOW, seconds=0.5)
        assert caught.value.loss == "slow"
        assert time.monotonic() - began < 20
        assert await is_right(await ask(workers, key))


@pytest.mark.usefixtures("in_production")
async def test_a_job_over_its_memory_harms_nobody() -> None:
    async with running(1, job_mib=64) as (workers, key):
        body = b'{"query": [1], "items": [' + b"[1]," * 5_000_000 + b'[1]], "label_token_ids": [1]}'
        answer = await ask(workers, key, body)
        assert answer == Broken("memory")
        assert await is_right(await ask(workers, key))


@pytest.mark.slow
@pytest.mark.usefixtures("in_production")
async def test_memory_that_the_tokeniser_asks_for_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "1")  # which needs memory too
    async with running(1, job_mib=48) as (workers, key):
        body = msgspec.json.encode({"query": "x" * 1_000_000, "items": ["a"], "label_token_ids": [1]})
        try:
            lost = await ask(workers, key, body, seconds=60)  # 1 s on an idle machine
        except WorkerLostError as error:
            lost = Broken(error.loss)
        assert lost == Broken("memory")
        assert await is_right(await ask(workers, key))


@pytest.mark.slow
async def test_a_job_that_is_left_is_killed_after_a_grace() -> None:
    async with running(1) as (workers, key):
        await until(lambda: workers._idle)
        pid = workers._idle[0].pid
        job = asyncio.create_task(ask(workers, key, SLOW))
        await asyncio.sleep(0.2)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        began = time.monotonic()
        assert await is_right(await ask(workers, key))
        assert time.monotonic() - began < GRACE_SECONDS + 15
        assert not any(channel.pid == pid for channel in workers._open)


async def test_a_killed_worker_is_replaced_beside_another() -> None:
    async with running(2) as (workers, key):
        await until(lambda: len(workers._idle) == 2)
        job = asyncio.create_task(ask(workers, key, SLOW))
        await asyncio.sleep(0.2)
        (busy,) = [channel for channel in workers._open if channel.busy]
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        await until(lambda: busy not in workers._open and len(workers._idle) == 2)


async def test_a_job_that_is_cancelled_as_a_worker_becomes_free_costs_no_worker() -> None:
    async with running(1) as (workers, key):
        async with workers.job(tenant="a", size=1, bulk=False):
            waiting = asyncio.create_task(ask(workers, key, tenant="b"))
            await until(lambda: len(workers._queue))
            waiting.cancel()
        assert isinstance(*await asyncio.gather(waiting, return_exceptions=True), asyncio.CancelledError)
        assert len(workers._queue) == 0
        assert await is_right(await ask(workers, key))


def test_the_fork_server_imports_no_server() -> None:
    program = "import sys; import yardstick_llm.gateway.requests.worker; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "yardstick_llm.gateway.requests.worker" in modules
    assert not {"litestar", "uvicorn", "aiohttp", "redis", "prometheus_client"} & set(modules)


async def test_bulk_leaves_one_worker_to_others() -> None:
    async with running(2) as (workers, key):

        async def bulk() -> None:
            async with workers.job(tenant="bulk", size=BULK + 1, bulk=True) as channel:
                await channel.ask(Read("score", key, FACTS, UNBOUND), [SLOW], seconds=30)

        jobs = [asyncio.create_task(bulk()) for _ in range(5)]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        assert await is_right(await ask(workers, key))
        assert time.monotonic() - began < 15
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def test_jobs_that_wait_are_bounded_in_number_and_bytes() -> None:
    async with running(1, max_jobs=2, max_bytes=1000) as (workers, key):
        async with workers.job(tenant="a", size=1, bulk=False):
            waiting = [asyncio.create_task(ask(workers, key, SCORE, tenant=tenant)) for tenant in "ab"]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await ask(workers, key)
        assert all([await is_right(answer) for answer in await asyncio.gather(*waiting)])
        async with workers.job(tenant="a", size=1, bulk=False):
            waiting = [asyncio.create_task(ask(workers, key, SCORE))]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await ask(workers, key, SCORE + b" " * 1000)
        assert await is_right(await waiting[0])


async def test_nothing_is_left_when_it_stops() -> None:
    async with running(2) as (workers, _):
        assert workers._forks
        server = workers._forks._process.pid
        await until(lambda: len(children(server)) == 2)
        pids = [server, *children(server)]
    await until(lambda: not any(_runs(pid) for pid in pids))


@pytest.mark.parametrize("turns", range(4))
async def test_nothing_is_left_when_it_stops_while_it_forks(turns: int) -> None:
    """conftest.py fails a test that leaves a socket open."""
    workers = Workers(Capacity(4, job_mib=256, max_jobs=10, max_bytes=1 << 20), Telemetry())
    workers.start()
    await workers.load(FILES)
    for _ in range(turns):
        await asyncio.sleep(0)
    await workers.stop()
    assert not workers._open
    assert not workers._tasks


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("cut", [3, FIRST_BYTES, 100_000])
@pytest.mark.parametrize(("message", "body"), [(10, 0), (10, 300_000), (100_000, 300_000)])
def test_a_job_is_received_however_it_is_cut(message: int, body: int, cut: int) -> None:
    data = HEADER.pack(message, body, False) + os.urandom(message + body)
    ours, theirs = socket.socketpair()
    received = threading.Event()

    def send() -> None:
        with ours:
            ours.sendall(data[:cut])
            time.sleep(0.002)
            ours.sendall(data[cut:])
            received.wait(10)  # the gateway sends nothing more before the answer
            ours.sendall(data[:-1])

    sender = threading.Thread(target=send)
    sender.start()
    with theirs:
        assert receive(theirs) == (data[HEADER.size :][:message], data[HEADER.size :][message:])
        received.set()
        assert receive(theirs) is None
    sender.join()


COST = LEAST_COST
"""Bytes of a job of the least cost."""


def queue_of(workers: int = 2) -> JobQueue:
    return JobQueue(Capacity(workers, 64, 1000, 1 << 30))


def taken(queue: JobQueue, count: int) -> list[str]:
    """The tenants of the next jobs, each of which takes as long as it was expected to."""
    tenants = []
    for _ in range(count):
        job = queue.pop()
        assert job is not None
        tenants.append(job.tenant)
        end(queue, job)
    return tenants


def end(queue: JobQueue, job: QueuedJob, costs: float = 0.0) -> None:
    """End ``job`` after its estimate, or after the time of ``costs`` jobs of the least cost."""
    seconds = costs * COST * SECONDS_PER_BYTE or job.estimate
    job.began = time.perf_counter() - seconds
    queue.ended(job)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans(), st.booleans()), max_size=60))
def test_the_queue_gives_everything_once(given: list[tuple[str, int, bool, bool]]) -> None:
    queue, expected = queue_of(), []
    for tenant, cost, bulk, left in given:
        job = QueuedJob(tenant, cost * COST, bulk)
        queue.push(job)
        if left:
            queue.discard(job)
        else:
            expected.append(job)
    found = []
    while (job := queue.pop()) is not None:
        found.append(job)
        end(queue, job)
    assert sorted(found, key=id) == sorted(expected, key=id)
    assert len(queue) == 0


def test_a_flood_of_one_tenant_leaves_every_other_job_to_another() -> None:
    queue = queue_of()
    for _ in range(100):
        queue.push(QueuedJob("flood", COST))
    assert taken(queue, 3) == ["flood"] * 3
    for _ in range(3):
        queue.push(QueuedJob("one", COST))
    assert taken(queue, 7).count("one") == 3


def test_costs_and_weights_divide_the_queue() -> None:
    queue = queue_of()
    for _ in range(60):
        queue.push(QueuedJob("dear", 3 * COST))
        queue.push(QueuedJob("cheap", COST))
        queue.push(QueuedJob("heavy", 3 * COST, weight=3))
    tenants = taken(queue, 70)
    assert tenants.count("dear") == pytest.approx(10, abs=2)
    assert tenants.count("cheap") == pytest.approx(30, abs=2)
    assert tenants.count("heavy") == pytest.approx(30, abs=2)


def test_a_tenant_is_charged_the_time_that_its_jobs_took() -> None:
    queue = queue_of()
    for tenant in ("slow", "quick"):
        for _ in range(40):
            queue.push(QueuedJob(tenant, COST))
    tenants = []
    for _ in range(33):
        job = queue.pop()
        assert job is not None
        tenants.append(job.tenant)
        end(queue, job, costs=10 if job.tenant == "slow" else 1)
    assert tenants.count("slow") == pytest.approx(3, abs=1)


def test_a_debt_outlives_the_jobs_and_idleness_saves_nothing() -> None:
    queue = queue_of()
    slow = QueuedJob("slow", COST)
    assert queue.passes(slow)
    end(queue, slow, costs=100)
    for _ in range(20):
        busy = QueuedJob("busy", COST)
        assert queue.passes(busy)
        end(queue, busy)
    for _ in range(10):
        for tenant in ("slow", "busy", "new"):
            queue.push(QueuedJob(tenant, COST))
    tenants = taken(queue, 12)
    assert tenants.count("slow") == 0
    assert tenants.count("busy") == pytest.approx(6, abs=1)
