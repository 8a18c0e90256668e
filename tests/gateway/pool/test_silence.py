"""Engines that answer no probes: noticed in time, and only where it is their own doing."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.fakes import FakeEngine, served
from tests.gateway.conftest import Start, metric
from tests.gateway.pool.test_pool import pool_of
from tests.processes import wait_until
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
    async with pool_of(silence_seconds=0.2) as pooled:
        with served(FakeEngine()) as url:
            pooled.say(url)
            await pooled.ready(1)
        await pooled.ready(0)
        await asyncio.sleep(0.4)
        assert 'yardstick_engines{model="fake",state="not_ready"} 1.0' in pooled.metrics()
        assert 'yardstick_engine_silences_total{model="fake"} 0.0' in pooled.metrics()


async def test_a_tokeniser_that_hangs_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TOKENIZER_TURN_SECONDS", 0.2)
    hanging, twin, other = FakeEngine(), FakeEngine(), FakeEngine(model="other", fingerprint="2")
    hanging.faults.tokenizer_hangs = True
    async with pool_of(hanging, twin, other) as pooled:
        pooled.say(pooled.urls[0])
        await asyncio.sleep(0.2)
        pooled.say(*pooled.urls)
        began = time.monotonic()
        await pooled.ready(2)
        assert time.monotonic() - began < 8
        await pooled.score("other")
        await pooled.score("fake")
        assert (len(hanging.scores), len(twin.scores), len(other.scores)) == (0, 1, 1)
        hanging.faults.tokenizer_hangs = False
        await pooled.ready(3)
        assert [len(model.replicas) for model in pooled.pool.models] == [2, 1]


async def test_an_entry_that_has_led_to_a_model_has_said_enough() -> None:
    async with pool_of(FakeEngine()) as pooled:
        pooled.say(*pooled.urls, "http://127.0.0.1:9")
        await pooled.ready(1)
        with pytest.raises(ModelNotFound):
            pooled.pool.model("typo")


async def test_a_model_that_is_being_loaded_is_not_ready() -> None:
    loading = FakeEngine(model="large", fingerprint="2", ready=False)
    async with pool_of(FakeEngine(), loading, startup_seconds=0) as pooled:
        pooled.say(*pooled.urls)
        await pooled.ready(1)
        await asyncio.sleep(0.2)
        with pytest.raises(NotReady):
            pooled.pool.model("large")
        with pytest.raises(ModelNotFound):
            pooled.pool.model("typo")
