"""A pod's own port for probes, its token, and its shutdown after SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.processes import Pod, alive, free_port, wait_until
from yardstick_llm.engine import wire
from yardstick_llm.engine.server.app import BearerTokenError, BearerTokens

LONG = wire.Generate("long", [5, 6], wire.Sampling(max_tokens=400, ignore_eos=True))
ENDLESS = wire.Generate("endless", [5, 6], wire.Sampling(max_tokens=2000, ignore_eos=True))


@pytest.fixture
def start(qwen3: Path) -> Iterator[Callable[..., Pod]]:
    pods: list[Pod] = []

    def start_pod(*arguments: str) -> Pod:
        pods.append(Pod(qwen3, *arguments))
        return pods[-1].wait_ready()

    yield start_pod
    for pod in pods:
        pod.close()


class Stream(threading.Thread):
    """A generation being read."""

    def __init__(self, pod: Pod, message: wire.Generate) -> None:
        super().__init__(daemon=True)
        self.pod, self.message = pod, message
        self.replies: list[wire.Reply] = []
        self.start()
        wait_until(lambda: len(self.replies) > 0)

    def run(self) -> None:
        reader = wire.FrameReader()
        with httpx.stream("POST", f"{self.pod.url}/generate", content=wire.encode(self.message)) as response:
            for chunk in response.iter_raw():
                self.replies += reader.feed(chunk)


@pytest.mark.slow
def test_a_token_is_asked_for_and_followed(tmp_path: Path, start: Callable[..., Pod]):
    file = tmp_path / "token"
    file.write_text("first\n")
    pod = start("--token-file", str(file))
    status, reply = pod.ask("/score", wire.Score("a", [5], [[7]], wire.Labels([1])))
    assert (status, reply.code, reply.retryable) == (401, "unauthorized", True)
    for path in ("/info", "/stats", "/tokenizer"):
        assert pod.client.get(path).status_code == 401
    for path in ("/livez", "/readyz", "/metrics"):
        assert pod.client.get(path).status_code == 200
    for wrong in ("Bearer second", "Bearer", "Basic first", "Bearer first2", "Bearer é".encode()):
        assert pod.client.get("/info", headers={"authorization": wrong}).status_code == 401
    pod.client.headers["authorization"] = "Bearer first"
    assert pod.ask("/score", wire.Score("a", [5], [[7]], wire.Labels([1])))[0] == 200
    file.write_text("second\nthird\n")
    assert pod.client.get("/info").status_code == 401
    for token in ("second", "third"):
        assert pod.client.get("/info", headers={"authorization": f"Bearer {token}"}).status_code == 200


def test_a_file_that_goes_away_or_is_emptied_keeps_the_last_token(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("first")
    token = BearerTokens(file)
    file.unlink()
    assert token.opens("Bearer first")
    file.write_text("")
    assert token.opens("Bearer first")
    assert not token.opens("Bearer ")
    file.write_text("second")
    assert not token.opens("Bearer first")
    with pytest.raises(BearerTokenError, match="cannot be read"):
        BearerTokens(tmp_path / "missing")


@pytest.mark.slow
def test_told_to_end_it_finishes_what_runs_and_refuses_the_rest(start: Callable[..., Pod]):
    port = free_port()
    pod = start("--health-port", str(port))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as health:
        wait_until(lambda: health.get("/readyz").status_code == 200)
        assert health.get("/livez").status_code == health.get("/metrics").status_code == 200
        assert health.get("/info").status_code == health.post("/score").status_code == 404, "it has health and nothing else"
    stream = Stream(pod, LONG)
    pod.process.send_signal(signal.SIGTERM)
    wait_until(lambda: pod.client.get("/readyz").status_code == 503)
    assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
    assert httpx.get(f"http://127.0.0.1:{port}/livez").status_code == 200
    status, reply = pod.ask("/score", wire.Score("late", [5], [[7]], wire.Labels([1])))
    assert (status, reply.code, reply.retryable) == (503, "not_ready", True)
    assert pod.process.wait(20) == 0
    stream.join(5)
    assert stream.replies[-1].finish == "length"
    assert sum(len(reply.tokens) for reply in stream.replies) == 400


@pytest.mark.slow
def test_when_its_time_is_over_what_runs_gets_its_last_word(start: Callable[..., Pod]):
    pod = start("--grace-seconds", "0.3")
    stream = Stream(pod, ENDLESS)
    began = time.monotonic()
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(10) == 0
    assert time.monotonic() - began < 4
    stream.join(5)
    assert isinstance(stream.replies[-1], wire.Failed)
    assert stream.replies[-1].retryable


@pytest.mark.slow
def test_an_idle_pod_leaves_at_once(start: Callable[..., Pod]):
    pod = start()
    began, loop_pid = time.monotonic(), pod.loop_pid
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(10) == 0
    assert time.monotonic() - began < 2
    wait_until(lambda: not alive(loop_pid))
