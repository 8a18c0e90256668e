"""Engines that answer no probes: noticed in time, and only where it is their own doing."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.fakes import FakeEngine, served
from tests.gateway.conftest import Start, metric
from tests.gateway.pool.test_pool import Told, engines_ready, pool_of, score
from tests.processes import until, wait_until
from yardstick_llm.gateway.errors import ModelNotFound, NotReady
from yardstick_llm.gateway.pool import pool as pool_module
from yardstick_llm.gateway.pool.pool import AwakeClock

SCORE = {"query": [1], "items": [[2]], "label_token_ids": [1]}


class Time:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_stands_still_while_nothing_could_be_received() -> None:
    now = Time()
    clock = AwakeClock(now)
    for _ in range(8):
        now.now += 0.25
        clock.tick()
    assert clock.now() == pytest.approx(2.0)
    now.now += 3600  # suspended; whoever asks first, and the tick afterwards, see little of it
    assert clock.now() == pytest.approx(2.35)
    clock.tick()
    assert clock.now() == pytest.approx(2.35)
    now.now += 0.25
    assert clock.now() == pytest.approx(2.6)


def test_requests_in_flight_go_to_another_engine(start: Start) -> None:
    engines = [FakeEngine(), FakeEngine()]
    client = start(*engines, silence_seconds=0.3)
    for engine in engines:
        engine.faults.delay = 0.02
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "seed": 3}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    silent: FakeEngine | None = None
    gap, last, data = 0.0, time.monotonic(), []
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
            data += [line] if line.startswith("data: ") else []
            if len(data) == 10 and silent is None:
                (silent,) = [engine for engine in engines if engine.running]
                silent.silent = silent.frozen = True
    assert silent is not None
    assert data[-1] == "data: [DONE]"
    assert "".join(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"] for line in data[:-1]) == whole
    assert gap < 5
    assert metric(client, 'yardstick_engine_silences_total{model="fake"}') == 1
    assert metric(client, 'yardstick_engines{model="fake",state="silent"}') == 1
    assert metric(client, 'yardstick_engine_retries_total{code="deadline_exceeded",model="fake"}') == 1
    silent.silent = silent.frozen = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 2)
    wait_until(lambda: len(silent.left) == 1)


async def test_an_engine_whose_process_has_ended_is_not_silent() -> None:
    """Its port refuses connections, unlike that of a process that is stopped."""
    source, engine = Told(), FakeEngine()
    async with pool_of(source, silence_seconds=0.2) as (_, _, telemetry):
        with served(engine) as url:
            source.say(url)
            await until(lambda: engines_ready(telemetry) == 1)
        await until(lambda: engines_ready(telemetry) == 0)
        await asyncio.sleep(0.4)
        page = b"".join(telemetry.exposition()).decode()
        assert 'yardstick_engines{model="fake",state="not_ready"} 1.0' in page
        assert 'yardstick_engine_silences_total{model="fake"} 0.0' in page


async def test_a_tokeniser_that_hangs_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TOKENIZER_TURN_SECONDS", 0.2)
    source, hanging, twin, other = Told(), FakeEngine(), FakeEngine(), FakeEngine(model="other", fingerprint="2")
    hanging.faults.tokenizer_hangs = True
    with served(hanging) as first, served(twin) as second, served(other) as third:
        async with pool_of(source) as (pool, dispatcher, telemetry):
            source.say(first)
            await asyncio.sleep(0.2)
            source.say(first, second, third)
            began = time.monotonic()
            await until(lambda: engines_ready(telemetry) == 2)
            assert time.monotonic() - began < 8
            await score(pool, dispatcher, "other")
            await score(pool, dispatcher, "fake")
            assert (len(hanging.scores), len(twin.scores), len(other.scores)) == (0, 1, 1)
            hanging.faults.tokenizer_hangs = False
            await until(lambda: engines_ready(telemetry) == 3)
            assert [len(model.replicas) for model in pool.models] == [2, 1]


async def test_an_entry_that_has_led_to_a_model_has_said_enough() -> None:
    source, engine = Told(), FakeEngine()
    with served(engine) as url:
        async with pool_of(source) as (pool, _, telemetry):
            source.say(url, "http://127.0.0.1:9")
            await until(lambda: engines_ready(telemetry) == 1)
            with pytest.raises(ModelNotFound):
                pool.model("typo")


async def test_a_model_that_is_being_loaded_is_not_ready() -> None:
    source, engine, loading = Told(), FakeEngine(), FakeEngine(model="large", fingerprint="2", ready=False)
    with served(engine) as one, served(loading) as two:
        async with pool_of(source, startup_seconds=0) as (pool, _, telemetry):
            source.say(one, two)
            await until(lambda: engines_ready(telemetry) == 1)
            await asyncio.sleep(0.2)
            with pytest.raises(NotReady):
                pool.model("large")
            with pytest.raises(ModelNotFound):
                pool.model("typo")
