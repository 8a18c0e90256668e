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

from engine.wire import TokenizerFiles
from gateway.errors import Overloaded
from gateway.ops.metrics import Telemetry
from gateway.reading.worker import FIRST_BYTES, receive
from gateway.schemas.score import ScoreRequest
from gateway.text.bounds import Bounds
from gateway.text.facts import Facts
from gateway.text.prepared import Packed, unpack
from gateway.text.spelling import TokenizerError
from gateway.workers import channel as channel_module
from gateway.workers.channel import WorkerLostError
from gateway.workers.fair import FairJobQueue
from gateway.workers.forks import Forks
from gateway.workers.job_queue import Capacity, JobQueue, QueuedJob
from gateway.workers.messages import HEADER, Answer, Broken, Decode, Decoded, Read, Refused, Whole
from gateway.workers.workers import BULK, Workers
from tests.fakes import EOS, TEMPLATE, ids, library
from tests.processes import until
from tests.warm import as_in_production

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
        return await channel.ask(Whole("score", Read(key, FACTS, UNBOUND)), [body], seconds=seconds)


def children(pid: int) -> list[int]:
    return [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]


def is_right(answer: Answer) -> bool:
    assert isinstance(answer, Packed), answer
    prepared = unpack(answer)
    texts = [[*prepared.prefix, *row] for row in prepared.rows]
    return texts == [ids("red shoes, blue"), ids("red shoes, red")]


@pytest.mark.usefixtures("in_production")
async def test_a_job_is_read_and_the_vocabulary_is_known() -> None:
    async with running() as (workers, key):
        assert is_right(await ask(workers, key))
        refused = await ask(workers, key, b'{"query": 1}')
        assert isinstance(refused, Refused)
        assert refused.param == "query"
        assert is_right(await ask(workers, key))


async def test_the_same_files_are_read_once_and_forgotten_with_their_last_user() -> None:
    async with running() as (workers, key):
        again, vocabulary = await workers.load(FILES)
        assert again == key
        other, second = await workers.load(msgspec.structs.replace(FILES, chat_template="x"))
        assert other != key
        assert second is not vocabulary
        assert is_right(await ask(workers, other))
        del second
        gc.collect()
        await until(lambda: other not in workers._files)
        assert is_right(await ask(workers, key))


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


@pytest.mark.parametrize("content", [b"{", b"", b'{"model": 3}'])
async def test_files_that_cannot_be_used_are_a_typed_error(content: bytes) -> None:
    async with running() as (workers, key):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            await workers.load(msgspec.structs.replace(FILES, tokenizer_json=content))
        assert is_right(await ask(workers, key))


async def test_a_killed_worker_is_replaced() -> None:
    async with running() as (workers, key):
        await until(lambda: len(workers._idle) == 2)
        for channel in list(workers._idle):
            os.kill(channel.pid, signal.SIGKILL)
        await until(lambda: not workers._idle or all(channel.answered == 0 for channel in workers._idle))
        await asyncio.sleep(1)
        assert is_right(await ask(workers, key))


@pytest.mark.slow
async def test_a_worker_that_ends_before_its_job_is_sent_is_reported_at_once() -> None:
    async with running() as (workers, key), workers.job(tenant="a", size=1, bulk=False) as channel:
        channel.ended(signal.SIGKILL)
        for _ in range(2):  # before and after the event loop reports the end of the connection
            with pytest.raises(WorkerLostError):
                async with asyncio.timeout(2):
                    await channel.ask(Whole("score", Read(key, FACTS, UNBOUND)), [SCORE], seconds=20)
            await channel.gone


@pytest.mark.usefixtures("in_production")
async def test_a_killed_fork_server_is_replaced_with_all_it_knew() -> None:
    async with running() as (workers, key):
        assert workers._forks
        old = workers._forks._process.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: workers._forks is not None and workers._forks._process.pid != old and workers._idle)
        assert is_right(await ask(workers, key))


async def test_workers_need_no_room_on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "lost"))
    async with running(1) as (workers, key):
        assert is_right(await ask(workers, key))


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
        assert is_right(await ask(workers, key))


async def test_a_job_over_its_time_is_killed_and_says_so() -> None:
    async with running(1) as (workers, key):
        began = time.monotonic()
        with pytest.raises(WorkerLostError) as caught:
            await ask(workers, key, SLOW, seconds=0.5)
        assert caught.value.loss == "slow"
        assert time.monotonic() - began < 20
        assert is_right(await ask(workers, key))


@pytest.mark.usefixtures("in_production")
async def test_a_job_over_its_memory_harms_nobody() -> None:
    async with running(1, job_mib=64) as (workers, key):
        body = b'{"query": [1], "items": [' + b"[1]," * 5_000_000 + b'[1]], "label_token_ids": [1]}'
        answer = await ask(workers, key, body)
        assert answer == Broken("memory")
        assert is_right(await ask(workers, key))


@pytest.mark.slow
@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("backtrace", ["0", "1"])
async def test_memory_that_the_tokeniser_asks_for_ends_the_worker(monkeypatch: pytest.MonkeyPatch, backtrace: str) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", backtrace)
    async with running(1, job_mib=48) as (workers, key):
        body = msgspec.json.encode({"query": "x" * 1_000_000, "items": ["a"], "label_token_ids": [1]})
        try:
            lost = await ask(workers, key, body, seconds=60)  # 1 s on an idle machine
        except WorkerLostError as error:
            lost = Broken(error.loss)
        assert lost == Broken("memory")
        assert is_right(await ask(workers, key))


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
        assert is_right(await ask(workers, key))
        assert time.monotonic() - began < channel_module.GRACE_SECONDS + 15
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
        assert is_right(await ask(workers, key))


async def test_a_short_job_that_is_left_does_not_cost_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.workers.channel.GRACE_SECONDS", 10.0)  # a busy machine takes long for a short job
    async with running(1) as (workers, key):
        await until(lambda: workers._idle)
        pid = workers._idle[0].pid
        job = asyncio.create_task(ask(workers, key))
        await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert is_right(await ask(workers, key))
        assert [channel.pid for channel in workers._open] == [pid]


async def test_a_request_that_is_decoded_and_left_is_dropped() -> None:
    async with running(1) as (workers, key):
        async with workers.job(tenant="a", size=len(SCORE), bulk=False) as channel:
            assert isinstance(await channel.ask(Decode("score"), [SCORE], seconds=5), Decoded)
            assert channel.keeps_request
        await until(lambda: workers._idle == [channel])
        assert not channel.keeps_request
        assert await channel.ask(Read(key, FACTS, UNBOUND), seconds=5) == Broken("fault")


def test_the_fork_server_imports_no_server() -> None:
    program = "import sys; import gateway.reading.forkserver; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "gateway.reading.worker" in modules
    assert not {"litestar", "uvicorn", "aiohttp", "redis", "prometheus_client"} & set(modules)


async def test_fields_without_bulk_reach_the_event_loop() -> None:
    async with running(1) as (workers, _), workers.job(tenant="a", size=1, bulk=True) as channel:
        body = {"query": "q" * 10**6, "items": ["i"] * 9999, "labels": ["l"], "apply_softmax": True, "strange": 1}
        encoded = msgspec.json.encode(body)
        parts = [encoded[place : place + 65536] for place in range(0, len(encoded), 65536)]
        decoded = await channel.ask(Decode("score"), parts, seconds=5)
        assert isinstance(decoded, Decoded)
        assert len(decoded.fields) < 500
        assert decoded.ignored == [], "long bodies are not searched for unknown fields"
        fields = msgspec.msgpack.decode(decoded.fields, type=ScoreRequest)
        assert (fields.query, fields.apply_softmax, fields.labels) == ("", True, [])


async def test_bulk_leaves_one_worker_to_others() -> None:
    async with running(2) as (workers, key):

        async def bulk() -> None:
            async with workers.job(tenant="bulk", size=BULK + 1, bulk=True) as channel:
                await channel.ask(Whole("score", Read(key, FACTS, UNBOUND)), [SLOW], seconds=30)

        jobs = [asyncio.create_task(bulk()) for _ in range(5)]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        assert is_right(await ask(workers, key))
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
        assert all(map(is_right, await asyncio.gather(*waiting)))
        async with workers.job(tenant="a", size=1, bulk=False):
            waiting = [asyncio.create_task(ask(workers, key, SCORE))]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await ask(workers, key, SCORE + b" " * 1000)
        assert is_right(await waiting[0])


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


@pytest.mark.parametrize("cut", [0, 3, 15, FIRST_BYTES, 100_000])
@pytest.mark.parametrize(("message", "body"), [(10, 0), (10, 100), (10, 300_000), (100_000, 0), (100_000, 300_000)])
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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=60))
def test_the_queue_gives_everything_once(jobs: list[tuple[str, int, bool]]) -> None:
    queue: FairJobQueue[tuple[int, bool]] = FairJobQueue()
    for number, (tenant, cost, bulk) in enumerate(jobs):
        queue.push((number, bulk), tenant=tenant, cost=cost, bulk=bulk)
    small = []
    while (item := queue.pop(bulk=False)) is not None:
        small.append(item)
    rest = []
    while (item := queue.pop(bulk=True)) is not None:
        rest.append(item)
    assert sorted(small) == [(number, bulk) for number, (_, _, bulk) in enumerate(jobs) if not bulk]
    assert sorted(rest) == [(number, bulk) for number, (_, _, bulk) in enumerate(jobs) if bulk]
    assert len(queue) == 0


def test_a_flood_of_one_tenant_leaves_every_other_job_to_another() -> None:
    queue: FairJobQueue[str] = FairJobQueue()
    for number in range(100):
        queue.push(f"flood {number}", tenant="flood", cost=10)
    assert [queue.pop(bulk=True) for _ in range(3)] == ["flood 0", "flood 1", "flood 2"]
    for number in range(3):
        queue.push(f"one {number}", tenant="one", cost=10)
    assert {queue.pop(bulk=True) for _ in range(7)} >= {"one 0", "one 1", "one 2"}


def test_costs_and_weights_divide_the_queue() -> None:
    queue: FairJobQueue[str] = FairJobQueue()
    for _ in range(60):
        queue.push("dear", tenant="dear", cost=30)
        queue.push("cheap", tenant="cheap", cost=10)
        queue.push("heavy", tenant="heavy", cost=30, weight=3)
    taken = [queue.pop(bulk=True) for _ in range(70)]
    assert taken.count("dear") == pytest.approx(10, abs=2)
    assert taken.count("cheap") == pytest.approx(30, abs=2)
    assert taken.count("heavy") == pytest.approx(30, abs=2)


def test_a_job_that_finds_the_queue_empty_counts_like_one_that_waits() -> None:
    orders = []
    for passes in (True, False):
        queue: FairJobQueue[str] = FairJobQueue()
        for cost in (30, 5):
            if passes:
                queue.passed(tenant="a", cost=cost)
            else:
                queue.push("first", tenant="a", cost=cost)
                assert queue.pop(bulk=True) == "first"
        for number in range(3):
            queue.push(f"a{number}", tenant="a", cost=10)
            queue.push(f"b{number}", tenant="b", cost=10)
        orders.append([queue.pop(bulk=True) for _ in range(6)])
    assert orders[0] == orders[1]
    assert orders[0][0] == "b0"


def test_a_tenant_is_charged_the_time_that_its_jobs_took() -> None:
    queue: FairJobQueue[str] = FairJobQueue()
    for tenant in ("slow", "quick"):
        for _ in range(40):
            queue.push(tenant, tenant=tenant, cost=1)
    taken = []
    for _ in range(33):
        tenant = queue.pop(bulk=True)
        assert tenant is not None
        taken.append(tenant)
        queue.corrected(tenant=tenant, more=9 if tenant == "slow" else 0)
    assert taken.count("slow") == pytest.approx(3, abs=1)


def test_a_debt_outlives_the_jobs_and_idleness_saves_nothing() -> None:
    queue: FairJobQueue[str] = FairJobQueue()
    queue.passed(tenant="slow", cost=1)
    queue.corrected(tenant="slow", more=9)
    for _ in range(20):
        queue.passed(tenant="busy", cost=0.1)
    for number in range(10):
        for tenant in ("slow", "busy", "new"):
            queue.push(f"{tenant} {number}", tenant=tenant, cost=1)
    taken = [str(queue.pop(bulk=True)) for _ in range(12)]
    assert sum(job.startswith("slow") for job in taken) == 0
    assert sum(job.startswith("busy") for job in taken) == pytest.approx(6, abs=1)


@pytest.mark.parametrize("bulk", [False, True])
def test_bulk_jobs_pass_only_to_their_share_of_the_workers(bulk: bool) -> None:
    queue = JobQueue(Capacity(2, 64, 10, 1000))
    first = QueuedJob("a", 1, bulk)
    assert queue.passes(first)
    assert queue.passes(QueuedJob("a", 1, bulk)) != bulk
    queue.ended(first)
    assert queue.passes(QueuedJob("b", 1, bulk))


async def test_no_job_passes_one_that_waits() -> None:
    queue = JobQueue(Capacity(2, 64, 10, 1000))
    queue.push(QueuedJob("a", 1))
    assert not queue.passes(QueuedJob("b", 1))


def test_discarded_jobs_are_not_given() -> None:
    queue: FairJobQueue[str] = FairJobQueue()
    jobs = [f"{number}" for number in range(5)]
    for job in jobs:
        queue.push(job, tenant="a", cost=1)
    queue.discard(jobs[0])
    queue.discard(jobs[3])
    assert len(queue) == 3
    assert [queue.pop(bulk=True) for _ in range(4)] == ["1", "2", "4", None]
    assert len(queue) == 0
