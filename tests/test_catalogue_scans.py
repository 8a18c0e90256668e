"""Requests for whole catalogues with a real engine: beside live requests, in bounded memory, and until their client leaves."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.checkpoints import make_checkpoint
from tests.gateway.conftest import metric
from tests.processes import Pod, Program, wait_until
from tests.redis import RedisServer
from tests.warm import as_in_production

SLOTS, BATCH, TOKENS = 20_000, 2000, 4
LABELS = [5, 6]
LIVE_ITEMS = 20
COMPUTED = "yardstick_engine_computed_tokens_total"


@dataclass(frozen=True)
class Memory:
    """Resident memory of the gateway and of the engine's loop, and memory that Redis uses, in MiB."""

    gateway: float
    loop: float
    redis: float


@dataclass
class Service:
    """A gateway before one engine, with a catalogue of ``items`` items of :data:`TOKENS` tokens."""

    items: int
    pod: Pod
    gateway: Program
    redis: RedisServer | None
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def register(self) -> None:
        """Register the catalogue ``large``."""
        client = self.gateway.client
        client.put("/v1/catalogues/large", json={"template": ["{item}", "{query}"]}).raise_for_status()
        for begin in range(0, self.items, BATCH):
            rows = [self.dice.choices(range(3, 200), k=TOKENS) for _ in range(BATCH)]
            items = [{"id": f"i{begin + place}", "token_ids": row} for place, row in enumerate(rows)]
            client.put("/v1/catalogues/large/items", content=msgspec.json.encode(items)).raise_for_status()

    def scan(self, query: str, leave_after: int | None = None) -> dict[str, list[float]]:
        """Score the whole catalogue, or leave after some results. Return the scores by id."""
        found: dict[str, list[float]] = {}
        body = {"query": query, "catalogue": "large", "stream": True, "label_token_ids": LABELS}
        with httpx.stream("POST", f"{self.gateway.url}/v1/score", json=body, timeout=120) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    found |= {result["id"]: result["scores"] for result in event.get("data", [])}
                if leave_after is not None and len(found) >= leave_after:
                    break
        return found

    def scores(self, query: str, ids: list[str]) -> list[list[float]]:
        """Score some items that are computed again."""
        body = {"query": query, "catalogue": "large", "ids": ids, "label_token_ids": LABELS}
        answer = self.gateway.client.post("/v1/score", json=body, headers={"cache-control": "no-cache"})
        return answer.raise_for_status().json()["scores"]

    def live(self) -> float:
        """Score a few items with a query of their own; return the seconds that it took."""
        ids = [f"i{self.dice.randrange(self.items)}" for _ in range(LIVE_ITEMS)]
        began = time.monotonic()
        self.scores(f"q{self.dice.random()}", ids)
        return time.monotonic() - began

    @property
    def memory(self) -> Memory:
        """Memory at present."""
        used = 0 if self.redis is None else self.redis.client().info("memory")["used_memory"]
        return Memory(resident(self.gateway.process.pid), resident(self.pod.loop_pid), used / 2**20)

    @property
    def idle(self) -> bool:
        """Whether the engine has no requests, and each of its slots is free or cached."""
        running, waiting, free, cached = (
            metric(self.pod.client, f"yardstick_engine_{name}")
            for name in ("requests_running", "requests_waiting", "slots_free", "slots_cached")
        )
        return running == waiting == 0 and free + cached == SLOTS

    def rests(self) -> bool:
        """Whether the engine stays idle for a while: between two requests of a scan it is idle, too."""
        before = self.computed
        time.sleep(0.3)
        return self.idle and self.computed == before

    @property
    def computed(self) -> float:
        """Tokens that the engine has computed."""
        return metric(self.pod.client, COMPUTED)


def resident(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def serving(directory: Path, items: int, *, shared: bool = False) -> Iterator[Service]:
    """Start a service. ``shared``: with catalogues and results in Redis."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start()) if shared else None
        pod = Pod(make_checkpoint(directory, "qwen3"), "--name", "tiny", "--max-total-tokens", str(SLOTS))
        stack.callback(pod.close)
        flags = [] if redis is None else ["--redis-url", redis.url]
        gateway = Program("gateway", "--engine", pod.wait_ready().url, *flags, YARDSTICK_REDIS_SECONDS="5")
        stack.callback(gateway.close)
        client = gateway.wait_ready().client
        wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
        if redis is not None:
            wait_until(lambda: metric(client, "yardstick_redis_available") == 1)
        service = Service(items, pod, gateway, redis)
        service.register()
        yield service


def leave(service: Service, query: str, after: int, *, seconds: float) -> float:
    """Leave a scan after some results, check that the engine's work ends within ``seconds``; return the tokens computed for it."""
    before = service.computed
    assert len(service.scan(query, leave_after=after)) >= after
    wait_until(service.rests, seconds)
    return service.computed - before


@pytest.mark.slow
def test_a_scan_has_every_item_once_and_ends_with_its_client(tmp_path: Path) -> None:
    with serving(tmp_path, BATCH) as service:
        found = service.scan("q1")
        assert sorted(found) == sorted(f"i{number}" for number in range(service.items))
        ids = service.dice.sample(sorted(found), 50)
        assert service.scores("q1", ids) == [pytest.approx(found[id], abs=1e-5) for id in ids]
        before = service.computed
        service.scan("q2")  # its items are cached, as are those of the next one
        whole = service.computed - before
        assert leave(service, "q3", 1, seconds=5) < 0.9 * whole


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
def test_scans_of_a_large_catalogue_beside_live_requests(tmp_path: Path, shared: bool) -> None:
    """Two scans: the second one's client leaves. Times are compared with those of the same requests before and after the scan, and
    with that of the scan. The reasons of the engine's growth are in docs/catalogue.md."""
    with as_in_production(), serving(tmp_path, 20_000, shared=shared) as service, ThreadPoolExecutor() as threads:
        alone = [service.live() for _ in range(20)]
        before, peak, live, tokens = service.memory, service.memory, list[float](), service.computed
        began = time.monotonic()
        scanning = threads.submit(service.scan, "one")
        while not scanning.done():
            live.append(service.live())
            peak = Memory(*map(max, vars(peak).values(), vars(service.memory).values()))
            time.sleep(0.05)
        assert len(scanning.result()) == service.items
        seconds, whole = time.monotonic() - began, service.computed - tokens
        alone += [service.live() for _ in range(20)]
        grown = Memory(*(most - least for most, least in zip(vars(peak).values(), vars(before).values(), strict=True)))
        median, slow, usual = statistics.median(live), sorted(live)[int(0.99 * len(live))], statistics.median(alone)
        print(f"{seconds:.1f} s; {len(live)} live requests: median {median:.3f} s, P99 {slow:.3f} s; alone {usual:.3f} s")
        print(f"MiB before: {before}; grown by {grown}")
        assert len(live) > 20
        assert median < max(6 * usual, seconds / 20)
        assert slow < max(6 * max(alone), seconds / 5), "no live request waits for a large part of the scan"
        assert grown.gateway < 50
        assert grown.redis < 32
        assert grown.loop < 200
        assert leave(service, "two", 2000, seconds=seconds / 4) < whole / 2
        assert statistics.median(service.live() for _ in range(5)) < 3 * max(alone)
