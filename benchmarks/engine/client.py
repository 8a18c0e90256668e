"""Open-loop load: ``python -m benchmarks.engine.client`` sends each request at its due time, whether or not earlier ones returned.

It is a separate process, so that neither the servers nor the report delay it. It reads one :class:`Job` from standard input,
creates every body before the first is due, and writes the samples to standard output.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.engine.workload import Workload
from engine import wire

SETTLE_SECONDS = 0.1
"""Pause between the last body and the first arrival."""
OK = "ok"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    url: str
    """URL of the gateway."""
    arrivals: list[float]
    """Seconds from the start, ascending."""
    vocab_size: int
    workload: Workload = Workload()
    seed: int = 0
    repeated: float = 0.0
    """Share of a request's items that an earlier request of the run had, with the same query."""
    cached: bool = False
    """Whether the gateway may answer from its result cache."""
    timeout_seconds: float = 120.0
    """Seconds after which a request counts as failed."""
    api_key: str | None = None


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


def requests(job: Job) -> Iterator[wire.Score]:
    """Yield the run's requests, all of random ids; see :attr:`Job.repeated`."""
    rng = np.random.default_rng(job.seed)
    earlier: list[wire.Score] = []
    for place in range(len(job.arrivals)):
        message = job.workload.request(str(place), rng, job.vocab_size)
        if earlier and job.repeated:
            message = _repeat(message, earlier[rng.integers(len(earlier))], round(job.repeated * job.workload.items), rng)
        if job.repeated:
            earlier.append(message)
        yield message


def _repeat(fresh: wire.Score, earlier: wire.Score, count: int, rng: np.random.Generator) -> wire.Score:
    """Return a request with ``count`` items of ``earlier`` and the rest of ``fresh``, in random order."""
    old: npt.NDArray[np.int64] = rng.choice(len(earlier.branches), count, replace=False)
    branches = [earlier.branches[place] for place in old] + fresh.branches[count:]
    mixed = [branches[place] for place in rng.permutation(len(branches))]
    return wire.Score(fresh.id, earlier.prefix, mixed, earlier.readout)


def body(message: wire.Score) -> bytes:
    """Return the HTTP body of a request."""
    assert isinstance(message.readout, wire.Labels)
    return msgspec.json.encode({"query": message.prefix, "items": message.branches, "label_token_ids": message.readout.tokens})


async def drive(job: Job) -> list[Sample]:
    """Send every request at its time; return the samples in that order when all have ended."""
    bodies = [body(message) for message in requests(job)]
    headers = {"content-type": "application/json"} | ({} if job.cached else {"cache-control": "no-cache"})
    headers |= {"authorization": f"Bearer {job.api_key}"} if job.api_key else {}
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
