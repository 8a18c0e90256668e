"""The scoring workload, and open-loop load: ``python -m benchmarks.engine.load`` sends each request at its due time, whether or not
earlier ones returned.

It is a separate process, so that neither the servers nor the report delay it, and imports no torch. It reads one :class:`Job` from
standard input, creates every body before the first is due, and writes the samples to standard output.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from yardstick_llm.engine import wire

LABELS_BELOW = 256
"""Upper bound of label ids. Every tokeniser has these tokens as text; the last rows of a head are often padding."""
SETTLE_SECONDS = 0.1
"""Pause between the last body and the first arrival."""
OK = "ok"


@dataclass(frozen=True)
class Workload:
    """One request's lengths, in tokens."""

    query: int = 120
    item: int = 180
    items: int = 10
    labels: int = 2

    def __str__(self) -> str:
        return f"{self.query}/{self.item}/{self.items}"

    @property
    def tokens(self) -> int:
        """Number of tokens that must be computed: the query once and every item once."""
        return self.query + self.items * self.item

    def request(self, name: str, rng: np.random.Generator, vocab_size: int) -> wire.Score:
        """Return one request of random token ids; no two requests share text."""

        def tokens(*shape: int) -> Any:
            return rng.integers(0, vocab_size, shape).tolist()

        labels = rng.choice(LABELS_BELOW, self.labels, replace=False).tolist()
        return wire.Score(name, tokens(self.query), tokens(self.items, self.item), wire.Labels(labels))


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    url: str
    """URL of the gateway."""
    arrivals: list[float]
    """Seconds from the start, ascending."""
    vocab_size: int
    workload: Workload = Workload()
    seed: int = 0
    timeout_seconds: float = 120.0
    """Seconds after which a request counts as failed."""


class Sample(msgspec.Struct, frozen=True):
    """Result of one request. Times are seconds from the start."""

    scheduled: float
    sent: float
    done: float
    outcome: str
    """``ok``, ``http`` and the status, ``timeout``, ``lost`` (no answer), or ``wrong`` (not one score list an item)."""
    items: int

    @property
    def latency(self) -> float:
        """Latency from the due time, so that delays of the client are included."""
        return self.done - self.scheduled


def poisson(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """``count`` arrival times of a Poisson process of ``rate`` a second: gaps are exponential and independent."""
    return [float(arrival) for arrival in rng.exponential(1 / rate, count).cumsum()]


def body(message: wire.Score) -> bytes:
    """Return the HTTP body of a request."""
    assert isinstance(message.readout, wire.Labels)
    return msgspec.json.encode({"query": message.prefix, "items": message.branches, "label_token_ids": message.readout.tokens})


async def drive(job: Job) -> list[Sample]:
    """Send every request at its time; return the samples in that order when all have ended."""
    rng, places = np.random.default_rng(job.seed), range(len(job.arrivals))
    bodies = [body(job.workload.request(str(place), rng, job.vocab_size)) for place in places]
    headers = {"content-type": "application/json", "cache-control": "no-cache"}
    timeout = aiohttp.ClientTimeout(total=job.timeout_seconds)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        clock = time.perf_counter  # uvloop's clock has a resolution of milliseconds
        start = clock() + SETTLE_SECONDS

        async def send(scheduled: float, content: bytes) -> Sample:
            sent = clock() - start
            outcome = await _ask(session, f"{job.url}/v1/score", content, job.workload.items)
            return Sample(scheduled, sent, clock() - start, outcome, job.workload.items)

        tasks = []
        for scheduled, content in zip(job.arrivals, bodies, strict=True):
            await asyncio.sleep(max(0.0, start + scheduled - clock()))
            tasks.append(asyncio.create_task(send(scheduled, content)))
        return await asyncio.gather(*tasks)


async def _ask(session: aiohttp.ClientSession, url: str, content: bytes, items: int) -> str:
    """Send one request and return its outcome."""
    try:
        async with session.post(url, data=content) as response:
            answer = await response.read()
            if response.status != 200:
                return f"http {response.status}"
            return OK if len(msgspec.json.decode(answer)["scores"]) == items else "wrong"
    except TimeoutError:
        return "timeout"
    except aiohttp.ClientError:
        return "lost"


def summarise(samples: list[Sample]) -> dict[str, object]:
    """Return counts, throughput until the last answer, and the client's largest delay."""
    done = sum(sample.items for sample in samples if sample.outcome == OK)
    failures = Counter(sample.outcome for sample in samples if sample.outcome != OK)
    return {
        "requests": len(samples),
        "failures": dict(sorted(failures.items())),
        "items_per_s": done / max(sample.done for sample in samples),
        "client_late_ms": 1000 * max(sample.sent - sample.scheduled for sample in samples),
    }


def main() -> None:
    """Run the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    gc.disable()  # pauses of the collector would be attributed to the server
    samples = uvloop.run(drive(job))
    sys.stdout.buffer.write(msgspec.json.encode(samples))


if __name__ == "__main__":
    main()
