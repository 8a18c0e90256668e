"""Scans of 20,000 registered items: memory is bounded, other requests stay quick, and a client that leaves ends its scan."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes import FakeEngine, Faults, served
from tests.processes import Program, wait_until
from tests.redis import RedisServer
from yardstick_llm.engine import wire

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.usefixtures("as_in_production")]

SCANNED, TOKENS, BATCH = 20_000, 180, 2000
MIB = 1 << 20
LIMITS = wire.Limits(max_branches=2048, max_slots=1 << 20, max_logprobs=20, max_labels=16, max_sequences=8)


def memory(program: Program) -> int:
    status = Path(f"/proc/{program.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


class Newest(list[Any]):
    """Keeps the newest element, and the number of all."""

    count = 0

    def append(self, element: Any) -> None:
        self[:] = [element]
        self.count += 1


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that keeps no messages, because those of a scan are many."""
    return FakeEngine(limits=LIMITS, scores=Newest(), item_scores=Newest(), faults=Faults(delay=0.02))


@pytest.fixture
def gateway(engine: FakeEngine) -> Iterator[Program]:
    with served(engine) as url, RedisServer.start() as redis:
        program = Program("gateway", "--engine", url, "--redis-url", redis.url, YARDSTICK_REDIS_SECONDS="5")
        try:
            program.wait_ready()
            wait_until(lambda: "yardstick_redis_available 1" in program.client.get("/metrics").text)
            yield program
        finally:
            program.close()


def register(client: httpx.Client) -> None:
    client.put("/v1/catalogues/large", json={"template": ["{item}", "{query}"]}).raise_for_status()
    tokens = random.Random(1).choices(range(3, 300), k=SCANNED + TOKENS)
    for begin in range(0, SCANNED, BATCH):
        items = [{"id": f"sku-{number}", "token_ids": tokens[number : number + TOKENS]} for number in range(begin, begin + BATCH)]
        answer = client.put("/v1/catalogues/large/items", content=msgspec.json.encode(items)).raise_for_status().json()
        assert answer["added"] == BATCH


def test_scans_run_beside_live_requests_and_end_with_their_client(gateway: Program, engine: FakeEngine) -> None:
    """Results are streamed: other requests stay quick, memory stays bounded, and a client that leaves ends its scan."""
    client, dice = gateway.client, random.Random(2)
    register(client)
    before, peak, most_running, live = memory(gateway), 0, 0, list[float]()

    def ask() -> float:
        body = {
            "query": f"q{dice.random()}",
            "catalogue": "large",
            "ids": [f"sku-{dice.randrange(SCANNED)}"] * 20,
            "label_token_ids": [5],
        }
        began = time.monotonic()
        client.post("/v1/score", json=body).raise_for_status()
        return time.monotonic() - began

    alone = statistics.median(ask() for _ in range(20))
    begun = engine.item_scores.count
    with ThreadPoolExecutor() as threads:
        scanning = threads.submit(scan, gateway, "first")
        while not scanning.done():
            live.append(ask())
            peak, most_running = max(peak, memory(gateway)), max(most_running, len(engine.running))
        assert scanning.result() == SCANNED
    print(f"{len(live)} live requests: median {statistics.median(live):.3f} s, slowest {max(live):.3f} s; alone {alone:.3f} s")
    print(f"resident {(peak - before) / MIB:.0f} MiB more than before, {most_running} messages at one time")
    assert len(live) > 20
    assert most_running < 32
    assert statistics.median(live) < 3 * alone + 0.1
    assert sorted(live)[int(0.99 * len(live))] < alone + 1
    assert peak - before < 50 * MIB
    whole, begun = engine.item_scores.count - begun - len(live), engine.item_scores.count
    assert scan(gateway, "second", leave_after=2000) >= 2000
    wait_until(lambda: not engine.running)
    time.sleep(0.5)  # a message may have been on its way
    sent = engine.item_scores.count
    time.sleep(0.5)
    assert engine.item_scores.count == sent, "nothing is computed for a client that left"
    assert sent - begun < whole / 2
    assert ask() < alone + 1


def scan(gateway: Program, query: str, leave_after: int = SCANNED + 1) -> int:
    """Score the whole catalogue; return the number of results that came before the end, or before leaving."""
    body = {"query": query, "catalogue": "large", "stream": True, "label_token_ids": [5]}
    results = 0
    with httpx.stream("POST", f"{gateway.url}/v1/score", json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                results += len(json.loads(line.removeprefix("data: ")).get("data", []))
            if results >= leave_after:
                break
    return results
