"""Engines that are stopped while they work: nothing fails, no stream stands still for more than 5 s, and they come back into use.

SIGSTOP stands for a process that hangs and for a machine that is gone: no connection closes and nothing answers.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.attacks.watch import metric_of, total_of
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program, gateway_before, wait_until
from yardstick_llm.engine import wire

pytestmark = pytest.mark.timeout(300)

LONGEST_GAP = 5.0
"""Seconds that a stream may stand still."""
TEXTS = [
    {"prompt": [place + 5, 8, 13], "max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": place, "logprobs": 1}
    for place in range(4)
]
SCORES = [
    {"query": [place + 3] * 30, "items": [[place, 7, item] for item in range(8)], "label_token_ids": [3, 4]} for place in range(4)
]
FRESH = {"cache-control": "no-store"}

STOPPED: dict[str, Callable[[Pod], list[int]]] = {
    "loop": lambda pod: [pod.loop_pid],
    "both": lambda pod: [pod.process.pid, pod.loop_pid],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def pod(model: Path) -> Iterator[Pod]:
    """On one thread, because threads of several processes wait for each other badly on few cores."""
    with Pod(model, "--name", "tiny", "--threads", "1") as pod:
        yield pod.wait_ready()


@pytest.fixture(scope="module")
def pods(pod: Pod, model: Path) -> Iterator[list[Pod]]:
    with Pod(model, "--name", "tiny", "--threads", "1") as other:
        yield [pod, other]


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Load:
    """Clients that stream and score without a pause, and check every answer against that of an engine left alone."""

    def __init__(self, gateway: Program, *, streams: int = 3, scores: int = 2) -> None:
        self._gateway = gateway
        self._clients = [self._stream] * streams + [self._score] * scores
        self._over = threading.Event()
        self.texts = [gateway.client.post("/v1/completions", json=body).raise_for_status().json() for body in TEXTS]
        self.scores = [gateway.client.post("/v1/score", json=body).raise_for_status().json()["scores"] for body in SCORES]
        self.streamed = self.scored = 0
        self.longest_gap = 0.0
        self._tokens: dict[int, int] = {}
        """Tokens of the stream that each client reads now, by thread."""

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(len(self._clients))
        self._running: list[Future[None]] = [self._threads.submit(self._repeat, client) for client in self._clients]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()
        for client in self._running:
            client.result()

    @property
    def in_the_middle(self) -> bool:
        return bool(self._tokens) and all(10 <= tokens <= 120 for tokens in self._tokens.values())

    def _repeat(self, ask: Callable[[httpx.Client, int], None]) -> None:
        with httpx.Client(base_url=self._gateway.url, timeout=60) as client:
            turn = 0
            while not self._over.is_set():
                ask(client, turn % len(TEXTS))
                turn += 1

    def _stream(self, client: httpx.Client, place: int) -> None:
        text, tokens, done = "", [], False
        last = time.monotonic()
        with client.stream("POST", "/v1/completions", json=TEXTS[place] | {"stream": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                now = time.monotonic()
                self.longest_gap = max(self.longest_gap, now - last)
                last = now
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["text"]
                    tokens += choice["logprobs"]["tokens"]
                    self._tokens[threading.get_ident()] = len(tokens)
        (whole,) = self.texts[place]["choices"]
        assert done
        assert (text, tokens) == (whole["text"], whole["logprobs"]["tokens"])
        self.streamed += 1

    def _score(self, client: httpx.Client, place: int) -> None:
        answer = client.post("/v1/score", json=SCORES[place], headers=FRESH)
        assert answer.status_code == 200, answer.text
        told = [value for row in answer.json()["scores"] for value in row]
        assert told == pytest.approx([value for row in self.scores[place] for value in row], abs=1e-6)
        self.scored += 1


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("which", STOPPED)
def test_one_of_two_is_stopped(pods: list[Pod], which: str) -> None:
    with gateway_before(*pods) as gateway:
        load = Load(gateway)
        with load:
            wait_until(lambda: load.in_the_middle, 60)
            with stopped(STOPPED[which](pods[0])):
                wait_until(lambda: metric_of(gateway, "yardstick_engines_ready") == 1, LONGEST_GAP)
                time.sleep(1)
                assert metric_of(gateway, f'yardstick_engine_requests_in_flight{{engine="{pods[0].url}",model="tiny"}}') == 0
            wait_until(lambda: metric_of(gateway, "yardstick_engines_ready") == 2)
            steps = pods[0].read("/stats", wire.Stats).steps
            wait_until(lambda: pods[0].read("/stats", wire.Stats).steps > steps + 50)
        assert load.streamed > 0
        assert load.scored > 0
        assert load.longest_gap <= LONGEST_GAP
        assert total_of(gateway, "yardstick_resumed_sequences_total") > 0
        assert total_of(gateway, "yardstick_engine_silences_total") == (0 if which == "loop" else 1)
        wait_until(lambda: not any(pod.read("/stats", wire.Stats).running for pod in pods))


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("which", STOPPED)
def test_the_only_engine_is_stopped(pod: Pod, which: str) -> None:
    """Clients are told so within a bounded time, and it works again when it goes on."""
    with gateway_before(pod, YARDSTICK_WAIT_SECONDS="1") as gateway:
        with gateway.client.stream("POST", "/v1/completions", json=TEXTS[0] | {"max_tokens": 1500, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            with stopped(STOPPED[which](pod)):
                began = time.monotonic()
                last = [line for line in lines if line.startswith("data: ")][-1]
                assert json.loads(last[6:])["error"]["code"] in ("not_ready", "deadline_exceeded")
                assert time.monotonic() - began < 8
                began = time.monotonic()
                refused = gateway.client.post("/v1/score", json=SCORES[0], headers=FRESH)
                assert time.monotonic() - began < 3
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
                assert int(refused.headers["retry-after"]) >= 1
                assert metric_of(gateway, "yardstick_engines_ready") == 0
            computed = pod.read("/stats", wire.Stats).computed_tokens
            wait_until(lambda: pod.read("/stats", wire.Stats).running == 0)
            assert pod.read("/stats", wire.Stats).computed_tokens < computed + 200, (
                "the loop hears at once that the work was given up"
            )
        wait_until(lambda: metric_of(gateway, "yardstick_engines_ready") == 1)
        assert gateway.client.post("/v1/score", json=SCORES[0], headers=FRESH).status_code == 200
        wait_until(lambda: pod.read("/stats", wire.Stats).running == 0)


@pytest.mark.waits
def test_health_of_an_engine_whose_loop_is_stopped(pod: Pod) -> None:
    with stopped([pod.loop_pid]):
        wait_until(lambda: pod.client.get("/readyz").status_code == 503, 4)
        assert "has stood still for 2 s" in pod.client.get("/readyz").text
        assert pod.client.get("/livez").status_code == 200, "a restart is not due yet"
        status, reply = pod.ask("/score", wire.Score("x", [5], [[7]], wire.Labels([1])))
        assert (status, reply.code, reply.retryable) == (503, "not_ready", True)
        assert metric_of(pod, "yardstick_engine_last_step_seconds") >= 2
    wait_until(lambda: pod.client.get("/readyz").status_code == 200, 4)
    wait_until(lambda: metric_of(pod, "yardstick_engine_last_step_seconds") < 2, 1)  # CPU time makes it ready before its first beat


@pytest.mark.slow
@pytest.mark.waits
def test_long_steps_are_not_silence(tmp_path: Path) -> None:
    """A step that takes longer than an engine may be silent for, on an engine that is as busy as it can be."""
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12}
    flags = ("--name", "slow", "--threads", "1", "--max-batched-tokens", "9216")
    with Pod(make_checkpoint(tmp_path, "qwen3", **shape), *flags) as pod, gateway_before(pod) as gateway:
        body = {"query": [5] * 100, "items": [[item] * 1000 for item in range(9, 17)], "label_token_ids": [3]}
        with ThreadPoolExecutor(2) as threads:
            bodies = (body, body | {"items": body["items"][:1]})
            asking = [threads.submit(gateway.client.post, "/v1/score", json=each, headers=FRESH) for each in bodies]
            longest = 0.0
            while not all(each.done() for each in asking):
                assert pod.client.get("/readyz").status_code == 200
                longest = max(longest, metric_of(pod, "yardstick_engine_last_step_seconds"))
                time.sleep(0.1)
        assert longest > 2.5
        assert [each.result().status_code for each in asking] == [200, 200]
        assert total_of(gateway, "yardstick_engine_silences_total") == 0
        assert not any("engine_retries_total{" in line for line in gateway.client.get("/metrics").text.splitlines())


@pytest.mark.slow
@pytest.mark.waits
def test_a_gateway_that_was_stopped_itself_blames_no_engine(pods: list[Pod]) -> None:
    with gateway_before(*pods) as gateway:
        with Load(gateway, streams=2, scores=1) as load:
            time.sleep(0.5)
            with stopped([gateway.process.pid]):
                time.sleep(4)
            time.sleep(1)
        assert load.streamed > 0
        assert total_of(gateway, "yardstick_engine_silences_total") == 0
        assert metric_of(gateway, "yardstick_engines_ready") == 2
