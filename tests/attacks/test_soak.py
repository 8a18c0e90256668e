"""A soak: well-behaved clients beside hostile ones, while engines are stopped and killed.

``SOAK_SECONDS`` chooses how long the hostile part lasts; an hour is ``make soak SOAK_SECONDS=3600``. The default is for CI, which
asks for right answers and bounded memory. The bound of latency holds for longer soaks only, because a short one gives no P99.
Well-behaved clients keep the engines busy by themselves in the quiet part too, so the comparison shows what hostile clients add.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.attacks.hostile import command
from tests.attacks.watch import Watch, tree_mib
from tests.checkpoints import make_checkpoint
from tests.gateway.keys import entry, write
from tests.processes import Pod, Program, wait_until

SECONDS = float(os.environ.get("SOAK_SECONDS", "14"))
LATENCY_SECONDS = 300.0
"""Shortest soak that checks latencies."""
QUIET_SECONDS = max(20.0, SECONDS / 10) if SECONDS >= LATENCY_SECONDS else 2.0
PAUSE_SECONDS = 0.0 if SECONDS >= LATENCY_SECONDS else 0.05
"""Time between two requests of a well-behaved client: a soak that checks no latency leaves processors to other tests."""
FLOOD_PAUSE = 0.02 if SECONDS >= LATENCY_SECONDS else 0.06
"""Time between two requests on each connection of a hostile flood."""
NICENESS = 19 if SECONDS >= LATENCY_SECONDS else 5
"""Nice value of the hostile clients. Other tests may run beside a short soak; with 19 the clients would get no CPU."""
INCIDENT_SECONDS = min(60.0, SECONDS / 5)
"""Time between two engines that are stopped or killed. There is one of each at least."""
STOP_SECONDS = min(10.0, SECONDS / 2)
LAST_SECONDS = min(30.0, SECONDS / 4)
"""Time from the beginning of the last incident to the end."""
SLACK_SECONDS = 0.05
"""Added to the bound of latency: what two shared cores add by themselves."""
MEMORY_MIB = 150

pytestmark = [
    pytest.mark.usefixtures("as_in_production"),
    pytest.mark.slow,
    pytest.mark.timeout(int(SECONDS + QUIET_SECONDS + 300)),
]

BODY = {"query": [9] * 30, "items": [[item, 7, 8, 9, 10, 11] for item in range(3, 13)], "label_token_ids": [3, 4]}
WORDS = {"prompt": "red shoes and blue shirts, " * 300}
JSON = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "seed": 3, "logprobs": 0} | {
    "guided_json": {"type": "object", "properties": {"size": {"type": "integer", "minimum": 20}}, "required": ["size"]}
}
KINDS = ("score", "stream", "tokenize", "json")
"""Requests of the well-behaved clients. Text workers read the last two."""
LIMITED = 20
"""Requests a minute of one of the keys that send schemas which are expensive to refuse."""
TEXT = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "ignore_eos": True, "seed": 3, "logprobs": 0, "stream": True}


class Deployment:
    def __init__(self, directory: Path) -> None:
        self._model = make_checkpoint(directory / "model", "qwen3", hidden_size=128, intermediate_size=384, num_hidden_layers=4)
        entries = [entry("good-1"), entry("good-2"), entry("hostile"), entry("limited", requests_per_minute=LIMITED)]
        keys = write(directory / "keys.json", *entries)
        self.pods = [self._pod() for _ in range(2)]
        for pod in self.pods:
            pod.wait_ready()
        engines = [argument for pod in self.pods for argument in ("--engine", pod.url)]
        self.gateway = Program("gateway", *engines, "--api-keys-file", str(keys), YARDSTICK_ACCESS_LOG="off")
        threading.Thread(target=self.gateway.process.stderr.read, daemon=True).start()  # a full pipe is another test's matter
        self.gateway.wait_ready()
        self.wait_engines(2)

    def _pod(self, port: int | None = None) -> Pod:
        pod = Pod(self._model, "--name", "soak", "--threads", "1", "--max-batched-tokens", "256", port=port)
        threading.Thread(target=pod.process.stderr.read, daemon=True).start()
        return pod

    def wait_engines(self, count: int) -> None:
        wait_until(lambda: f"yardstick_engines_ready {count}.0" in self.gateway.client.get("/metrics").text, 60)

    def stop_and_continue(self, place: int) -> None:
        pid = self.pods[place].loop_pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_SECONDS)
        os.kill(pid, signal.SIGCONT)
        self.wait_engines(2)

    def kill_and_start(self, place: int) -> None:
        pod = self.pods[place]
        for pid in (pod.loop_pid, pod.process.pid):
            os.kill(pid, signal.SIGKILL)
        pod.process.wait()
        time.sleep(3)
        pod.close()
        self.pods[place] = self._pod(pod.port).wait_ready()
        self.wait_engines(2)

    def close(self) -> None:
        for program in (self.gateway, *self.pods):
            program.close()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("soak"))
    yield deployment
    deployment.close()


@dataclass
class Sample:
    kind: str
    began: float
    seconds: float
    failure: str | None = None


@dataclass
class Clients:
    """Well-behaved clients: two for each of two keys, each with one request at a time."""

    url: str
    samples: list[Sample] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)
    """First answer of each kind; every later one must be equal to it."""

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*[self._client(f"good-{1 + number % 2}", end) for number in range(4)])

    async def _client(self, key: str, end: float) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}, timeout=timeout) as session:
            while time.monotonic() < end:
                for kind, ask in zip(KINDS, (self._score, self._stream, self._tokenize, self._json), strict=True):
                    began = time.monotonic()
                    failure = None
                    try:
                        answer = await ask(session)
                        if self.expected.setdefault(kind, answer) != pytest.approx(answer, abs=1e-4):
                            failure = "another answer"
                    except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
                        failure = f"{type(error).__name__}: {error}"
                    self.samples.append(Sample(kind, began, time.monotonic() - began, failure))
                    await asyncio.sleep(PAUSE_SECONDS)

    async def _score(self, session: aiohttp.ClientSession) -> list[float]:
        async with session.post(f"{self.url}/v1/score", json=BODY, headers={"cache-control": "no-store"}) as answer:
            assert answer.status == 200, f"{answer.status} {await answer.text()}"
            return [value for row in (await answer.json())["scores"] for value in row]

    async def _stream(self, session: aiohttp.ClientSession) -> list[float]:
        logprobs: list[float] = []
        async with session.post(f"{self.url}/v1/completions", json=TEXT) as answer:
            assert answer.status == 200, f"{answer.status} {await answer.text()}"
            done = False
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    logprobs += [value for choice in event["choices"] for value in choice["logprobs"]["token_logprobs"]]
                done = done or line.startswith(b"data: [DONE]")
            assert done, "the stream broke off"
        return logprobs

    async def _tokenize(self, session: aiohttp.ClientSession) -> list[float]:
        return (await self._answer(session, "tokenize", WORDS))["tokens"]

    async def _json(self, session: aiohttp.ClientSession) -> list[float]:
        return (await self._answer(session, "completions", JSON))["choices"][0]["logprobs"]["token_logprobs"]

    async def _answer(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
        async with session.post(f"{self.url}/v1/{path}", json=body) as answer:
            assert answer.status == 200, f"{answer.status} {await answer.text()}"
            return await answer.json()


class Incidents:
    """Stops and kills engines in turn, and records when."""

    def __init__(self, deployment: Deployment, end: float) -> None:
        self.times: list[tuple[float, float]] = []
        self.failure: BaseException | None = None
        self._deployment = deployment
        self._end = end
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self.failure:
            raise self.failure

    def during(self, sample: Sample) -> bool:
        """Whether an engine was away, or coming back, during a part of ``sample``."""
        return any(begin - 1 < sample.began + sample.seconds and sample.began < end + 2 for begin, end in self.times)

    def _run(self) -> None:
        kinds = [self._deployment.stop_and_continue, self._deployment.kill_and_start]
        turn = 0
        try:
            while turn < len(kinds) or time.monotonic() + INCIDENT_SECONDS / 2 + LAST_SECONDS < self._end:
                time.sleep(INCIDENT_SECONDS / 2)
                began = time.monotonic()
                kinds[turn % 2](turn // 2 % 2)
                self.times.append((began, time.monotonic()))
                turn += 1
                time.sleep(INCIDENT_SECONDS / 2)
        except BaseException as error:  # for the thread that joins
            self.failure = error


def p99(samples: list[Sample], kind: str) -> float:
    seconds = [sample.seconds for sample in samples if sample.kind == kind]
    return statistics.quantiles(seconds, n=100)[-1] if len(seconds) > 1 else max(seconds, default=0.0)


def test_soak(deployment: Deployment) -> None:
    gateway = deployment.gateway
    quiet = Clients(gateway.url)
    asyncio.run(quiet.run(QUIET_SECONDS))
    idle = tree_mib(gateway.process.pid)
    loud = Clients(gateway.url, expected=quiet.expected)
    start = [*command(NICENESS), gateway.url]
    attacks = [["hostile", str(SECONDS), str(FLOOD_PAUSE)], ["limited", str(SECONDS), "0.1", "0", "schemas"]]
    attackers = [subprocess.Popen([*start, *attack], stdout=subprocess.PIPE, text=True) for attack in attacks]
    incidents = Incidents(deployment, time.monotonic() + SECONDS)
    with Watch(gateway) as watch:
        asyncio.run(loud.run(SECONDS))
    hostile, limited = [json.loads(attacker.communicate(timeout=120)[0].splitlines()[-1]) for attacker in attackers]
    incidents.join()
    report = {
        "hostile": hostile["answers"],
        "limited": limited["answers"],
        "samples": len(loud.samples),
        "incidents": len(incidents.times),
        "peak MiB": round(watch.peak_mib - idle),
        "slowest livez": round(watch.slowest_livez, 3),
    }
    for kind in KINDS:
        calm = [sample for sample in loud.samples if not incidents.during(sample)]
        report |= {
            f"{kind} P99 quiet": round(p99(quiet.samples, kind), 4),
            f"{kind} P99": round(p99(calm, kind), 4),
            f"{kind} longest with incidents": round(max(s.seconds for s in loud.samples if s.kind == kind), 2),
        }
    print(json.dumps(report, indent=2))
    failures = [sample for sample in (*quiet.samples, *loud.samples) if sample.failure]
    assert not failures, failures[:5]
    assert not hostile["faults"]
    assert not limited["faults"]
    assert sum(count for answer, count in limited["answers"].items() if not answer.endswith(" 429")) <= LIMITED * (2 + SECONDS / 60)
    for kind in KINDS:
        if SECONDS >= LATENCY_SECONDS:
            assert report[f"{kind} P99"] <= 2 * report[f"{kind} P99 quiet"] + SLACK_SECONDS
        assert report[f"{kind} longest with incidents"] <= 10
    wait_until(lambda: tree_mib(gateway.process.pid) - idle < MEMORY_MIB, pause=0.5)
