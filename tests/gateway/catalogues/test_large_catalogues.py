"""100,000 registered items: memory is bounded and given back, requests stay quick."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine import wire
from tests.fakes import FakeEngine, served
from tests.processes import Program, wait_until
from tests.redis import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.usefixtures("as_in_production")]

ITEMS, TOKENS, BATCH = 100_000, 180, 2000
MIB = 1 << 20
LIMITS = wire.Limits(max_branches=2048, max_slots=1 << 20, max_logprobs=20, max_labels=16, max_sequences=8)


def memory(program: Program) -> int:
    """Resident bytes of the gateway's process."""
    status = Path(f"/proc/{program.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def gateway(request: pytest.FixtureRequest) -> Iterator[Program]:
    engine = FakeEngine(limits=LIMITS)
    with served(engine) as url, RedisServer.start() as redis:
        flags = [] if request.param == "memory" else ["--redis-url", redis.url]
        program = Program("gateway", "--engine", url, *flags, YARDSTICK_REDIS_SECONDS="5")
        try:
            program.wait_ready()
            if flags:
                wait_until(lambda: "yardstick_redis_available 1" in program.client.get("/metrics").text)
            yield program
        finally:
            program.close()


def test_a_hundred_thousand_items(gateway: Program) -> None:
    client, dice = gateway.client, random.Random(1)
    client.put("/v1/catalogues/large", json={"template": ["{item}", "{query}"]}).raise_for_status()
    tokens = dice.choices(range(3, 300), k=ITEMS + TOKENS)
    idle = memory(gateway)
    slowest = 0.0
    for begin in range(0, ITEMS, BATCH):
        items = [{"id": f"sku-{number}", "token_ids": tokens[number : number + TOKENS]} for number in range(begin, begin + BATCH)]
        began = time.monotonic()
        answer = client.put("/v1/catalogues/large/items", content=msgspec.json.encode(items)).raise_for_status().json()
        slowest = max(slowest, time.monotonic() - began)
        assert answer["added"] == BATCH
    state = client.get("/v1/catalogues/large").json()
    assert (state["items"], state["tokens"]) == (ITEMS, ITEMS * TOKENS)
    ids = [f"sku-{number}" for number in range(ITEMS)]
    for _ in range(10):
        body = {"query": "a", "catalogue": "large", "ids": dice.sample(ids, 1000), "label_token_ids": [5]}
        assert client.post("/v1/score", json=body).raise_for_status().json()["usage"]["prompt_tokens"] > 1000 * TOKENS
    full = memory(gateway) - idle
    print(f"store {state['bytes'] / MIB:.0f} MiB, resident {full / MIB:.0f} MiB more than idle, slowest batch {slowest:.2f} s")
    assert full < state["bytes"] + 100 * MIB
    client.delete("/v1/catalogues/large").raise_for_status()
    for number in range(3):
        client.put(f"/v1/catalogues/other-{number}", json={}).raise_for_status()
    assert client.get("/v1/catalogues").json()["data"][0]["items"] == 0
