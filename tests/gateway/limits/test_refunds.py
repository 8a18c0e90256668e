"""The final charge of a request: one request for a refusal, nothing for a failure, what was used for an answer, what was begun
where the client left."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import LIMITS, FakeEngine
from tests.gateway.answers import asking
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import by, entry, write
from tests.processes import wait_until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.limits.limiter import NOTHING, Cost, Lease, Limits, LocalLimiter, used

LIMITED = {"requests_per_minute": 30, "tokens_per_minute": 3000, "items_per_minute": 60}
"""Half a request, 50 tokens and one item come back in a second."""
SCORE = {"query": list(range(1, 101)), "items": [[1] * 100] * 3, "label_token_ids": [1]}
"""600 tokens, 3 items."""
PROMPT = list(range(1, 201))

Begin = Callable[..., httpx.Client]


@pytest.fixture(params=["memory", "redis"])
def begin(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Begin:
    """Starts a gateway whose limits of the keys ``a`` to ``d`` are kept in memory, or in Redis."""

    def begin_with(*engines: FakeEngine, **settings: Any) -> httpx.Client:
        if request.param == "redis":
            server = request.getfixturevalue("redis")
            settings |= {"redis_url": server.url, "redis_seconds": 2.0, "redis_prefix": f"r{random.getrandbits(60)}"}
        return start(*engines, api_keys_file=write(tmp_path / "keys.json", *[entry(key, **LIMITED) for key in "abcd"]), **settings)

    return begin_with


def charged(client: httpx.Client, key: str = "a") -> Cost:
    """Charged so far, by asking for as little as possible. What came back since is not counted."""
    body = {"query": [1], "items": [[2]], "label_token_ids": [1]}
    answer = client.post("/v1/score", json=body, headers=by(key))
    assert answer.status_code in (200, 503, 502, 429), answer.text
    left = [int(answer.headers[f"x-ratelimit-remaining-{name}"]) for name in ("requests", "tokens", "items")]
    requests, tokens, items = (limit - rest for limit, rest in zip(LIMITED.values(), left, strict=True))
    return Cost(requests - 1, tokens - 2, items - 1)


class About:
    """A cost, less what has come back since the test began."""

    def __init__(self, *cost: int, began: float | None = None) -> None:
        self.cost = cost
        self.began = time.monotonic() if began is None else began

    @property
    def slack(self) -> list[float]:
        """Tokens that came back, of each rate."""
        return [1 + limit * (time.monotonic() - self.began) / 60 for limit in LIMITED.values()]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, tuple)
        return all(most - back <= found <= most for found, most, back in zip(other, self.cost, self.slack, strict=True))

    def __repr__(self) -> str:
        return f"{self.cost}, less what came back in {time.monotonic() - self.began:.1f} s"


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return client.post(f"/v1/{path}", json=body, headers=by("a"))


def send_refunded(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a request when refunds of earlier ones have reached Redis, in the background: a refusal meanwhile costs a request."""
    time.sleep(0.05)
    return send(client, path, body)


BODIES = {
    "score": SCORE,
    "completions": {"prompt": PROMPT, "max_tokens": 1000},
    "chat/completions": {"messages": [{"role": "user", "content": "a" * 500}], "max_tokens": 1000},
    "length": {"input": [[1] * 300, [2] * 300]},
}


def test_what_an_engine_cannot_answer_costs_nothing_and_what_it_refuses_a_request(begin: Begin) -> None:
    engine = FakeEngine()
    client, expected = begin(engine), About(0, 0, 0)
    codes: dict[wire.ErrorCode, int] = {"overloaded": 429, "internal": 500, "out_of_memory": 503, "deadline": 504, "invalid": 400}
    for code, status in codes.items():
        engine.faults.fail = wire.Failed("", code, "as told")
        for path, body in BODIES.items():
            assert send_refunded(client, path, body).status_code == status, (path, code)
            if path.endswith("completions"):
                assert send_refunded(client, path, body | {"stream": True}).status_code == status
        engine.faults.fail = None
        time.sleep(0.2)  # the gateway writes to Redis in the background
        if code == "invalid":
            expected.cost = (expected.cost[0] + 6, *expected.cost[1:])
        assert charged(client) == expected, code
        expected = About(*(before + probe for before, probe in zip(expected.cost, (1, 2, 1), strict=True)), began=expected.began)


def test_an_engine_that_breaks_or_is_away_costs_nothing(begin: Begin) -> None:
    engine = FakeEngine()
    client, expected = begin(engine, wait_seconds=0.05), About(0, 0, 0)
    engine.faults.break_after = 0
    assert send(client, "score", SCORE).status_code == 502
    assert send(client, "completions", BODIES["completions"]).status_code == 502
    engine.faults.break_after = None
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    assert send(client, "score", SCORE).status_code == 503
    engine.ready = True
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert charged(client) == expected


def test_answers_are_charged(begin: Begin) -> None:
    engine = FakeEngine(says=[5, 6])
    client, expected = begin(engine), About(4, 600 + 600 + 203 + 600, 3 + 3 + 2)
    assert send(client, "score", SCORE).status_code == 200
    assert send(client, "score", SCORE).status_code == 200, "also from the cache"
    assert send(client, "completions", BODIES["completions"]).status_code == 200
    assert send(client, "length", BODIES["length"]).status_code == 200
    time.sleep(0.2)  # the gateway writes to Redis in the background
    assert charged(client) == expected


def leave(client: httpx.Client, path: str, body: dict[str, Any], when: Callable[[], bool], key: str = "a") -> None:
    """Send a request, and close the connection once ``when`` holds."""
    with asking(client, f"/v1/{path}", body, **by(key)):
        wait_until(when)
    wait_until(lambda: metric(client, "yardstick_requests_in_flight") == 0)
    time.sleep(0.2)  # the gateway writes to Redis in the background


def test_a_client_that_leaves_before_an_engine_has_its_request_pays_for_reading_only(begin: Begin) -> None:
    engine = FakeEngine()
    client = begin(engine, wait_seconds=20)
    expected = {key: About(int(path == "chat/completions"), 0, 0) for key, path in zip("abcd", BODIES, strict=True)}
    engine.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    for key, path in zip("abcd", BODIES, strict=True):
        leave(client, path, BODIES[path], lambda: metric(client, "yardstick_requests_waiting") == 1, key)
    engine.ready = True
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert {key: charged(client, key) for key in expected} == expected
    assert not engine.generates
    assert not engine.values


def test_a_client_that_leaves_pays_for_what_was_sent_to_engines(begin: Begin) -> None:
    engine = FakeEngine(limits=msgspec.structs.replace(LIMITS, max_branches=8))
    client, expected = begin(engine), About(1, 16 * 12, 16)
    engine.faults.delay = 5
    body = {"query": [1] * 10, "items": [[2, place] for place in range(1, 41)], "label_token_ids": [1]}
    leave(client, "score", body, lambda: len(engine.running) == 2)
    assert len(engine.scores) == 2, "two of five messages at a time"
    engine.faults.delay = 0
    assert charged(client) == expected


def test_a_client_that_leaves_before_the_first_token_pays_for_its_prompt(begin: Begin) -> None:
    engine = FakeEngine()
    client, expected = begin(engine), About(1, 200, 0)
    engine.faults.delay = 5
    body = {"prompt": PROMPT, "max_tokens": 1000}
    leave(client, "completions", body, lambda: len(engine.running) == 1)
    engine.faults.delay = 0
    assert charged(client) == expected


@pytest.mark.slow
@pytest.mark.parametrize("who", ["engine", "client"])
def test_a_stream_that_breaks_is_charged_what_was_used(begin: Begin, who: str) -> None:
    engine = FakeEngine(says=[5] * 1000)
    client, came_back = begin(engine), About(0, 0, 0)
    body = {"prompt": [1] * 1000, "max_tokens": 1000, "stream": True, "ignore_eos": True, "return_token_ids": True}
    if who == "engine":
        engine.faults.fail_after = 100
        assert "error" in send(client, "completions", body).text
    else:
        engine.faults.delay, engine.faults.pause_after, engine.faults.pause = 0.002, 100, 60.0
        with client.stream("POST", "/v1/completions", json=body, headers=by("a")) as answer:
            lines, drawn = (line for line in answer.iter_lines() if line), 0
            while drawn < 100:  # a busy gateway sends several tokens at a time
                drawn += len(json.loads(next(lines).removeprefix("data: "))["choices"][0]["token_ids"])
        engine.faults.delay, engine.faults.pause_after = 0.0, None
    wait_until(lambda: metric(client, "yardstick_requests_in_flight") == 0)
    time.sleep(0.1)
    found, slack = charged(client), came_back.slack
    assert 1 - slack[0] <= found.requests <= 1
    assert 1100 - slack[1] <= found.tokens <= 1100


ENDINGS = st.tuples(st.sampled_from([200, 429, 499, 503]), st.floats(0, 1), st.booleans())
"""Status, share of the expected cost that was used, and whether to end the oldest or the newest."""
COSTS = st.builds(Cost, st.just(1), st.integers(0, 500), st.integers(0, 20))
RATES = Limits((50, 1000, 40))


@dataclass
class Bucket:
    """The algorithm in other words: ``limit`` tokens that come back evenly."""

    limit: int
    left: float
    at: float = 1000.0

    def add(self, amount: float, now: float) -> float:
        """Take or give back ``amount``, and return what is left."""
        self.left = min(self.limit, self.left + (now - self.at) * self.limit / 60)
        self.left, self.at = min(self.limit, self.left + amount), now
        return self.left


def settle(taken: Lease, status: int, share: float) -> Cost:
    """As the gateway does it."""
    taken.used_tokens = int(share * taken.cost.tokens)
    taken.begun = Cost(1, taken.used_tokens, int(share * taken.cost.items))
    taken.charged = used(taken, status)
    return taken.charged


@given(steps=st.lists(st.tuples(st.just(0.0) | st.floats(0, 40), st.one_of(COSTS, ENDINGS)), max_size=60))
async def test_each_rate_is_a_bucket_that_fills_evenly_and_takes_refunds(steps: list[tuple[float, Any]]) -> None:
    """However long requests run and whatever is refunded when they end, nothing is lost or made."""
    limiter, buckets, open_, now = LocalLimiter(), [Bucket(limit, limit) for limit in RATES.rates if limit], [], 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("yardstick_llm.gateway.limits.limiter.time.monotonic", lambda: now)
        for place, (pause, step) in enumerate(steps):
            now += pause
            if isinstance(step, Cost):
                taken = Lease("a", str(place), RATES, step)
                verdict = await limiter.take(taken)
                missing = [amount - bucket.add(0, now) for bucket, amount in zip(buckets, step, strict=True)]
                if any(abs(each) < 1e-3 for each in missing):
                    return  # the two round differently
                assert (verdict.denied is None) == (max(missing) < 0)
                if verdict.denied is None:
                    open_.append(taken)
                else:
                    waits = [each * 60 / bucket.limit for each, bucket in zip(missing, buckets, strict=True)]
                    assert verdict.wait == pytest.approx(max(waits), abs=1e-3)
                charged = step if verdict.denied is None else NOTHING
                for level, bucket, amount in zip(verdict.levels, buckets, charged, strict=True):
                    left = bucket.add(-amount, now)
                    assert level is not None
                    assert level.remaining == pytest.approx(int(left), abs=1)
                    assert level.reset == pytest.approx((bucket.limit - left) * 60 / bucket.limit, abs=1e-3)
            elif open_:
                status, share, oldest = step
                taken = open_.pop(0 if oldest else -1)
                for bucket, expected, final in zip(buckets, taken.cost, settle(taken, status, share), strict=True):
                    bucket.add(expected - final, now)
                limiter.end(taken)
