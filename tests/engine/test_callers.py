"""The loop schedules by, and reports on, the callers of requests."""

from __future__ import annotations

import logging
import math
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.parity import make_loop
from tests.engine.tenants import Clock
from tests.engine.test_loop import run
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.checks import MAX_CALLER_CHARACTERS
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.loop.replies import BURST, LINES_PER_SECOND, RequestLog
from yardstick_llm.engine.server import metrics

TOKENS = [111, 222, 131]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)


@pytest.fixture
def build(checkpoint: Path) -> Callable[..., Loop]:
    return partial(make_loop, checkpoint, overlap=False)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """Log records about requests, at the log level of a running engine."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("yardstick_llm.engine.loop.replies"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def score(name: str, tenant: str = "", **extra) -> wire.Score:
    caller = wire.Caller(request_id=f"client-{name}", tenant=tenant)
    return wire.Score(name, TOKENS, [TOKENS], wire.Labels([1]), caller=caller, **extra)


def test_the_time_in_the_queue_is_told(build):
    loop, clock = build(max_running_requests=1), Clock()
    loop._clock = loop._scheduler._clock = clock
    caller = wire.Caller(tenant="a")
    loop.submit(wire.Score("first", [5], [[6]], wire.Labels([1]), caller=caller))
    clock.now = 0.5
    loop.submit(wire.Generate("second", [7], wire.Sampling(max_tokens=3, n=2, ignore_eos=True), caller=caller))
    loop.submit(wire.Score("third", [8], [[9]], wire.Labels([1]), caller=caller))
    replies = []
    while not loop.idle:
        clock.now += 1
        replies += loop.step()
    told = {(reply.id, getattr(reply, "index", 0)): [] for reply in replies}
    for reply in replies:
        told[reply.id, getattr(reply, "index", 0)].append(reply.queue_seconds)
    assert told == {("first", 0): [1.5], ("second", 0): [2.0, 0, 0], ("second", 1): [0, 0, 0], ("third", 0): [5.0]}


def test_queue_time_and_deadline_count_from_the_receipt(build):
    loop, clock = build(), Clock()
    loop._clock = loop._scheduler._clock = clock
    clock.now = 8.0
    generate = wire.Generate("g", TOKENS, wire.Sampling(max_tokens=1))
    items = wire.ScoreItems("i", wire.pack_ids(TOKENS), wire.pack_ids([len(TOKENS)]), TOKENS, wire.Labels([1]))
    for message in (score("in time", deadline=3.5), score("late", deadline=2.5), generate, items):
        loop.submit(message, received=5.0)
    loop.submit(score("now", deadline=2.5))
    loop.submit(wire.Generate("late text", TOKENS, wire.Sampling(max_tokens=1), deadline=2.5), received=5.0)
    replies = {reply.id: reply for reply in run(loop)}
    assert [replies.pop(name).code for name in ("late", "late text")] == ["deadline", "deadline"]
    assert {name: reply.queue_seconds for name, reply in replies.items()} == {"in time": 3.0, "g": 3.0, "i": 3.0, "now": 0.0}


def test_a_preempted_request_tells_the_time_to_its_first_step(build):
    loop, clock = build(), Clock()
    loop._clock = loop._scheduler._clock = clock
    loop.submit(wire.Generate("g", TOKENS, wire.Sampling(max_tokens=2, ignore_eos=True)))
    clock.now = 2.0
    loop._scheduler.schedule()
    loop._scheduler.allocator.preempt(loop._scheduler.get("g"))
    clock.now = 9.0
    replies = run(loop)
    assert [reply.queue_seconds for reply in replies] == [2.0, 0]


def test_a_full_queue_is_shared(build, lines):
    loop = build(max_running_requests=1, max_waiting=4)
    for place in range(6):
        loop.submit(score(f"a{place}", "a"))
    for place in range(3):
        loop.submit(score(f"b{place}", "b"))
    replies = run(loop)
    failed = {reply.id: reply for reply in replies if isinstance(reply, wire.Failed)}
    # Four wait; a4 and a5 find the queue full. Each of b takes the place of a's newest, until both have two.
    assert set(failed) == {"a4", "a5", "a3", "a2", "b2"}
    assert all((reply.code, reply.retryable) == ("overloaded", True) for reply in failed.values())
    assert all(reply.retry_after >= 1 for reply in failed.values())
    assert {reply.id for reply in replies} == {*(f"a{place}" for place in range(6)), "b0", "b1", "b2"}
    assert (loop.stats.refused_queue, loop.stats.displaced, loop.stats.tenants) == (3, 2, 0)
    text = [record.getMessage() for record in lines]
    assert sum(line.startswith("request displaced ") for line in text) == 2
    assert sum('reason="queue_full"' in line for line in text) == 3


def test_metrics_name_reasons_and_no_tenants(build):
    loop = build(max_running_requests=1, max_waiting=1)
    for tenant in ("secret-a", "secret-b"):
        loop.submit(score(tenant, tenant))
    loop.submit(wire.Score("bad", [5], [], wire.Labels([1 << 20])))
    text = metrics.render(loop.stats)
    assert "yardstick_engine_tenants 1.0" in text
    assert 'yardstick_engine_refused_total{reason="queue_full"} 1.0' in text
    assert 'yardstick_engine_refused_total{reason="invalid"} 1.0' in text
    assert 'yardstick_engine_refused_total{reason="displaced"} 0.0' in text
    assert "secret" not in text


def test_the_log_names_requests_that_end_without_a_result(build, lines, monkeypatch):
    loop, clock = build(), Clock()
    loop._clock = loop._scheduler._clock = clock
    loop.submit(wire.Score("invalid", TOKENS, [[]], wire.Labels([1]), caller=wire.Caller("client-invalid")))
    loop.submit(score("late", deadline=1.0))
    loop.submit(wire.Generate("left", TOKENS, wire.Sampling(max_tokens=9), caller=wire.Caller("client-left")))
    loop.submit(wire.Abort("left"))
    clock.now = 2.0
    loop.step()

    def fail(*args):
        raise torch.OutOfMemoryError(f"no memory for {TOKENS}")

    monkeypatch.setattr(loop._runner, "launch", fail)
    run(loop, score("failed"))
    assert [(record.levelname, *record.getMessage().split()[1:3]) for record in lines] == [
        ("WARNING", "refused", 'request_id="client-invalid"'),
        ("INFO", "aborted", 'request_id="client-left"'),
        ("INFO", "expired", 'request_id="client-late"'),
        ("WARNING", "failed", 'request_id="client-failed"'),
    ]
    own = [record.getMessage() for record in lines]
    assert 'code="out_of_memory"' in own[-1]
    assert not [line for line in own for token in TOKENS if str(token) in line]


def test_the_log_is_one_line_whatever_the_id(lines):
    RequestLog().write("refused", wire.Caller('x" code="ok\nrequest refused'), "id\r\n\x1b[2J", code="invalid")
    (line,) = [record.getMessage() for record in lines]
    assert line.isprintable()
    assert 'request_id="x\\" code=\\"ok\\nrequest refused"' in line


def test_a_flood_does_not_fill_the_log(lines):
    clock = Clock()
    log = RequestLog(clock)
    for _ in range(100):
        for place in range(1000):
            log.write("refused", wire.Caller("r"), str(place), code="overloaded")
        clock.now += 1
    assert len(lines) == pytest.approx(BURST + 99 * LINES_PER_SECOND, abs=2)
    left_out = [int(record.getMessage().rpartition("left_out=")[2]) for record in lines if "left_out" in record.getMessage()]
    assert sum(left_out) + len(lines) == pytest.approx(100_000, abs=1000)


@pytest.mark.slow
def test_a_reader_that_stops_does_not_stop_the_engine():
    """Standard error is often a pipe. A write to a full pipe blocks until someone reads from it."""
    code = """
import logging
from yardstick_llm.engine.server.loop_process import start_logs
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.replies import RequestLog
handler, clock = start_logs(), iter(range(1 << 30))
log = RequestLog(clock.__next__)
for place in range(5000):
    log.write("refused", wire.Caller("r" * 100), str(place), code="overloaded")
assert handler.dropped > 0
print("done", flush=True)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert select.select([process.stdout], [], [], 30)[0], "it waits for its reader"
        assert process.stdout.readline() == "done\n"
        process.kill()


FAULTS = {
    "weight 0": {"weight": 0.0},
    "weight too large": {"weight": 1e4},
    "weight that is no number": {"weight": math.nan},
    "long request id": {"request_id": "r" * (MAX_CALLER_CHARACTERS + 1)},
    "long tenant": {"tenant": "t" * 10_000_000},
}


@pytest.fixture(scope="module")
def loop(checkpoint: Path) -> Loop:
    return make_loop(checkpoint, overlap=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_callers_are_refused(loop: Loop, lines, fault: str):
    caller = wire.Caller(**FAULTS[fault])
    for message in (wire.Score("x", [1], [[2]], wire.Labels([1]), caller=caller), wire.Generate("x", [1], caller=caller)):
        (reply,) = run(loop, message)
        assert (reply.id, reply.code, reply.retryable) == ("x", "invalid", False)
        assert next(iter(FAULTS[fault])) in reply.message
        assert len(reply.message) < 200
    assert max(len(record.getMessage()) for record in lines) < 4 * MAX_CALLER_CHARACTERS
    assert loop.stats.tenants == 0
