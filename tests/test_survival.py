"""Engines as real processes, one of them killed while it works: the stream does not break. tests/attacks/test_soak.py kills them
beside other requests too."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.watch import metric_of, total_of
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program, gateway_before

pytestmark = [pytest.mark.alone, pytest.mark.waits, pytest.mark.slow, pytest.mark.timeout(300)]

BODY = {"prompt": "the quick brown fox", "max_tokens": 240, "temperature": 1.0, "seed": 11, "logprobs": 1, "n": 2} | {
    "guided_json": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{300}$"}}, "required": ["a"]},
    "bad_words": ["Yes"],
}
"""An object whose only string is longer than the text."""


def kill_the_busy_one(gateway: Program, pods: list[Pod]) -> None:
    """Kill both processes of the engine that works, at once and without a word."""
    name = 'yardstick_engine_requests_in_flight{{engine="{}",model="tiny"}}'
    (busy,) = [pod for pod in pods if metric_of(gateway, name.format(pod.url))]
    for pid in (busy.process.pid, busy.loop_pid):
        os.kill(pid, signal.SIGKILL)


def test_a_stream_outlives_its_engine(tmp_path: Path) -> None:
    """Two answers that follow a schema: texts, tokens and log-probabilities are those of an engine that was left alone."""
    model = make_checkpoint(tmp_path, "qwen3")
    with Pod(model, "--name", "tiny") as one, Pod(model, "--name", "tiny") as two, gateway_before(one, two) as gateway:
        whole = gateway.client.post("/v1/completions", json=BODY).raise_for_status().json()
        choices: list[dict[str, Any]] = []
        killed = False
        with gateway.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            for line in filter(None, answer.iter_lines()):
                if line != "data: [DONE]":
                    choices += json.loads(line.removeprefix("data: "))["choices"]
                if len(choices) >= 20 and not killed:
                    kill_the_busy_one(gateway, [one, two])
                    killed = True
        assert line == "data: [DONE]"
        assert total_of(gateway, "yardstick_resumed_sequences_total") > 0
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for choice in choices:
        texts[choice["index"]] += choice["text"]
        told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
        logprobs[choice["index"]] += zip(told["tokens"], told["token_logprobs"], strict=True)
    for choice in whole["choices"]:
        tokens, numbers = zip(*logprobs[choice["index"]], strict=True)
        assert (texts[choice["index"]], [*tokens]) == (choice["text"], choice["logprobs"]["tokens"])
        assert [*numbers] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert len(tokens) > 150
        assert re.match(r'\{\s*"a"\s*:\s*"[a-z]{200}', choice["text"])
