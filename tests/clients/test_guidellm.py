"""guidellm measures a gateway: it asks ``/health``, and streams with token counts in every chunk."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.demo import MODELS
from loadgen.records import Record, read
from tests.clients.environments import run_shell
from tests.gateway.conftest import metrics
from tests.processes import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FEW_WORKERS = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "GUIDELLM__MP_CONTEXT_TYPE": "forkserver"}
"""Each of its processes would import all of it, which takes seconds of CPU, and by default there are up to ten."""


def test_a_sweep_runs_to_its_end(demo: Program, cache: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_shell(
        "guidellm_sweep.sh",
        demo.url,
        str(MODELS / "base"),
        str(report),
        environment="evaluation",
        seconds=300,
        **cache | FEW_WORKERS,
    )
    benchmarks = json.loads(report.read_text())["benchmarks"]
    kinds = [benchmark["config"]["strategy"]["type_"] for benchmark in benchmarks]
    assert (kinds[:2], set(kinds[2:])) == (["synchronous", "throughput"], {"constant"})
    one_by_one = benchmarks[0]["requests"]
    assert (len(one_by_one["successful"]) in (5, 6), one_by_one["incomplete"]) == (True, []), "it may leave out its last one"
    for benchmark in benchmarks:
        requests = benchmark["requests"]
        assert requests["errored"] == []
        assert requests["successful"]
        assert all(request["output_metrics"]["text_tokens"] == 8 for request in requests["successful"])


REQUESTS = 40
ENOUGH = 30
"""Requests whose quartiles are compared. guidellm may leave out its last one; a slow machine completes fewer in the time."""
SCENARIO = """
duration_s = 6

[arrivals]
kind = "closed"
clients = 1

[[workloads]]
kind = "chat"
max_tokens = 8
extra = {{ ignore_eos = true }}
data = {{ file = "{prompts}", rows = {rows} }}
"""


@dataclass
class Served:
    """The server's own measurements of chats until now."""

    chats: float
    seconds: float
    """In sum, each until the answer's end."""
    first: float
    """In sum, each until the answer's beginning."""

    @classmethod
    def by(cls, server: Program) -> Served:
        labels = '{model="yardstick-demo",route="/v1/chat/completions"}'
        names = ("request_seconds_count", "request_seconds_sum", "first_byte_seconds_sum")
        return cls(*metrics(server.client, *(f"yardstick_{name}{labels}" for name in names)))


@pytest.mark.alone
def test_guidellm_and_yardstick_load_agree(demo: Program, cache: dict[str, str], tmp_path: Path) -> None:
    """Both send the same prompts to the same server, one program after the other. The machine's speed may change in between, so
    each is compared with what the server measured of its requests."""
    report = tmp_path / "report.json"
    begin = Served.by(demo)
    run_shell(
        "guidellm_run.sh",
        demo.url,
        str(MODELS / "base"),
        str(report),
        str(REQUESTS),
        environment="evaluation",
        seconds=300,
        **cache | FEW_WORKERS,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["requests"]["errored"] == []
    theirs = benchmark["requests"]["successful"]
    middle = Served.by(demo)
    bodies = [json.loads(request["request_args"])["body"] for request in theirs]
    prompts = [body["messages"][0]["content"][0]["text"] for body in bodies]
    ours = load_run(demo.url, prompts, tmp_path)
    end = Served.by(demo)

    both = min(len(theirs), len(ours))
    assert both >= ENOUGH
    lengths = [request["input_metrics"]["text_tokens"] for request in theirs]
    assert [record.prompt_tokens for record in ours[:both]] == lengths[:both]
    assert {record.completion_tokens for record in ours} == {request["output_metrics"]["text_tokens"] for request in theirs} == {8}
    check([(record.latency, record.ttft, record.tpot) for record in ours], middle, end)
    milliseconds = ("time_to_first_token_ms", "inter_token_latency_ms")
    check([(request["request_latency"], *(request[name] / 1000 for name in milliseconds)) for request in theirs], begin, middle)


def check(measured: list[tuple[float, float, float]], before: Served, after: Served) -> None:
    """Latency, time to the first token and time for each further token, of every request, are those that the server measured."""
    chats = after.chats - before.chats
    latency, first, each = (statistics.fmean(column) for column in zip(*measured, strict=True))
    assert latency == pytest.approx((after.seconds - before.seconds) / chats, rel=0.15)
    assert 0.9 * (after.first - before.first) / chats <= first <= latency
    assert first + 7 * each == pytest.approx(latency, rel=0.1)


def load_run(url: str, prompts: list[str], folder: Path) -> list[Record]:
    """The requests of `yardstick load run` with these prompts."""
    file, scenario = folder / "prompts.jsonl", folder / "scenario.toml"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    scenario.write_text(SCENARIO.format(prompts=file, rows=len(prompts)))
    command = [sys.executable, "-m", "loadgen", "run", str(scenario), "--url", url, "--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = read([folder / "out"])
    assert not [record for record in run.records if record.failure]
    return run.records
