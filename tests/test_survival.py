"""Engines as real processes, killed while they work: no score fails, no stream breaks."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.watch import total_of
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program, wait_until

pytestmark = [pytest.mark.alone, pytest.mark.waits, pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = {"prompt": "the quick brown fox", "max_tokens": 240, "ignore_eos": True, "temperature": 1.0, "seed": 11, "logprobs": 1}

STRUCTURED = {name: value for name, value in TEXT.items() if name != "ignore_eos"} | {
    "guided_json": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{300}$"}}, "required": ["a"]},
    "bad_words": ["Yes"],
}
"""An object whose only string is longer than the text."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


class Fleet:
    def __init__(self, model: Path) -> None:
        self.model = model
        self.pods = [self.pod() for _ in range(2)]
        for pod in self.pods:
            pod.wait_ready()
        entries = [argument for pod in self.pods for argument in ("--engine", pod.url)]
        self.gateway = Program("gateway", *entries).wait_ready()
        self.wait_for(2)

    def pod(self, port: int | None = None) -> Pod:
        return Pod(self.model, "--name", "tiny", port=port)

    def kill(self, place: int) -> None:
        """Both of its processes, at once and without a word."""
        pod = self.pods[place]
        for pid in (pod.process.pid, pod.loop_pid):
            os.kill(pid, signal.SIGKILL)
        pod.process.wait()

    def revive(self, place: int) -> None:
        self.pods[place].close()
        self.pods[place] = self.pod(self.pods[place].port).wait_ready()
        self.wait_for(2)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: f"yardstick_engines_ready {count}.0" in self.gateway.client.get("/metrics").text, 30)

    def running(self) -> int:
        lines = self.gateway.client.get("/metrics").text.splitlines()
        loads = {
            line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("yardstick_engine_requests_in_flight{")
        }
        (busy,) = [url for url, load in loads.items() if load]
        return [pod.url for pod in self.pods].index(busy)

    def close(self) -> None:
        for program in (self.gateway, *self.pods):
            program.close()


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Fleet]:
    fleet = Fleet(model)
    yield fleet
    fleet.close()


def choices_of(events: list[dict[str, Any]]) -> dict[int, tuple[str, list[str], list[float]]]:
    """The text, tokens and log-probabilities of each choice of a stream."""
    found: dict[int, tuple[str, list[str], list[float]]] = {}
    for event in events:
        for choice in event["choices"]:
            text, tokens, logprobs = found.get(choice["index"], ("", [], []))
            told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            found[choice["index"]] = (text + choice["text"], tokens + told["tokens"], logprobs + told["token_logprobs"])
    return found


@pytest.mark.parametrize(("body", "n"), [(TEXT, 1), (STRUCTURED, 2)], ids=["free", "structured"])
def test_a_stream_outlives_its_engine(fleet: Fleet, body: dict[str, Any], n: int) -> None:
    whole = fleet.gateway.client.post("/v1/completions", json=body | {"n": n}).raise_for_status().json()
    events: list[dict[str, Any]] = []
    killed, done = None, False
    with fleet.gateway.client.stream("POST", "/v1/completions", json=body | {"n": n, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                assert "error" not in events[-1]
            done = line == "data: [DONE]" or done
            if len(events) == 20 and killed is None:
                killed = fleet.running()
                fleet.kill(killed)
    assert killed is not None
    assert done
    told = choices_of(events)
    for choice in whole["choices"]:
        text, tokens, logprobs = told[choice["index"]]
        assert (text, tokens) == (choice["text"], choice["logprobs"]["tokens"])
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert len(tokens) > 150
        assert body is TEXT or re.match(r'\{\s*"a"\s*:\s*"[a-z]{200}', text)
    assert total_of(fleet.gateway, "yardstick_resumed_sequences_total") > 0
    fleet.revive(killed)


def test_no_score_fails(fleet: Fleet) -> None:
    """Killed and revived in turn while four clients score: every answer is 200, and equal to that of an engine left alone."""
    ended = threading.Event()
    answers: list[tuple[int, int]] = []
    scores: dict[int, list[list[float]]] = {}

    def body(place: int) -> dict[str, Any]:
        return {"query": [place % 50 + 1] * 30, "items": [[place, 7, item] for item in range(8)], "label_token_ids": [3, 4]}

    def ask(client: int) -> None:
        with httpx.Client(base_url=fleet.gateway.url, timeout=30) as asking:
            turn = 0
            while not ended.is_set():
                place = (client * 61 + turn) % 250
                answer = asking.post("/v1/score", json=body(place), headers={"cache-control": "no-store"})
                answers.append((place, answer.status_code))
                if answer.status_code == 200:
                    scores[place] = answer.json()["scores"]
                turn += 1

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, client) for client in range(4)]
        try:
            for place in (0, 1):
                time.sleep(0.5)
                fleet.kill(place)
                time.sleep(0.5)
                fleet.revive(place)
            time.sleep(0.5)
        finally:
            ended.set()
        for each in asking:
            each.result()
    assert len(answers) > 50
    assert {status for _, status in answers} == {200}
    for place in list(scores)[:20]:
        again = fleet.gateway.client.post("/v1/score", json=body(place), headers={"cache-control": "no-store"}).json()["scores"]
        assert [value for row in scores[place] for value in row] == pytest.approx([v for row in again for v in row], abs=1e-6)
