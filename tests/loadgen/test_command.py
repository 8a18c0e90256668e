"""``yardstick load`` as it is typed, against a real gateway in front of a fake engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways
from tests.loadgen.servers import serving
from tests.loadgen.test_client import good
from yardstick_llm.loadgen.cli import main

ROOT = Path(__file__).parents[2]
MIXED = """
name = "mixed"
duration_s = 2
objectives = ["failures == 0", "p99 <= 10s", "ttft_p90 <= 10s", "cache_hit_rate > 20%"]

[arrivals]
kind = "constant"
rate = 20

[[workloads]]
kind = "score"
weight = 2
vocab_size = 300
query_length = 20
item_length = { kind = "uniform", min = 5, max = 20 }
items = 4
repeated_queries = 0.9
repeated_items = 0.6

[[workloads]]
kind = "score"
name = "texts"
input = "text"
query_length = 5
item_length = 5
items = { kind = "empirical", values = [1, 3] }
labels = [" Yes", " No"]

[[workloads]]
kind = "chat"
logprobs = 2
max_tokens = 6
prompt_length = 5
extra = { ignore_eos = true }

[[workloads]]
kind = "completions"
stream = false
input = "tokens"
vocab_size = 300
max_tokens = 3
extra = { ignore_eos = true }
"""


YARDSTICK_LOAD, LOADGEN = "yardstick_llm.gateway.cli load", "yardstick_llm.loadgen"
"""The second is what the first becomes; it starts warm."""


def yardstick(*arguments: str, program: str = LOADGEN, text: str | None = None, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", *program.split(), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def gateway(tmp_path: Path) -> Any:
    file = tmp_path / "keys.json"
    made = subprocess.run(
        [sys.executable, "-m", "yardstick_llm.gateway.cli", "keys", "new", "me", "--file", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    with gateways() as start:
        client: httpx.Client = start(FakeEngine(), api_keys_file=file)
        yield str(client.base_url).rstrip("/"), made.stdout.strip()


@pytest.mark.slow
def test_a_run_from_the_command_line_to_its_reports(gateway: Any, tmp_path: Path) -> None:
    url, key = gateway
    scenario, out = tmp_path / "mixed.toml", tmp_path / "out"
    scenario.write_text(MIXED)
    arguments = ["run", str(scenario), "--url", url, "--out", str(out), "--log-records"]
    done = yardstick(*arguments, program=YARDSTICK_LOAD, YARDSTICK_API_KEY=key)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stderr, "plain, as this is no terminal"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["passed"]
    assert (result["requests"], result["failures"]) == (40, 0)
    assert result["workloads"].keys() == {"score", "texts", "chat", "completions"}
    assert sum(part["requests"] for part in result["workloads"].values()) == 40
    chat = result["workloads"]["chat"]
    assert chat["completion_tokens"] == 6 * chat["requests"]
    assert 0 < chat["ttft_p50_ms"] <= chat["latency_p50_ms"]
    assert result["workloads"]["completions"]["completion_tokens"] == 3 * result["workloads"]["completions"]["requests"]
    assert "PASS  failures == 0: 0" in done.stdout
    assert json.loads((out / "summary.json").read_text()) == result
    assert "time to first token" in (out / "report.txt").read_text()
    assert result["machine"]["python"]
    assert result["command"].startswith("yardstick load run")

    everything = done.stdout + done.stderr + "".join(file.read_text() for file in out.iterdir())
    assert key not in everything

    again = yardstick("report", str(out))
    assert json.loads(again.stdout.splitlines()[-1]) == result
    from_log = yardstick("report", "-", "--out", str(tmp_path / "log"), text=done.stdout)
    assert json.loads(from_log.stdout.splitlines()[-1]) == result
    assert (tmp_path / "log" / "report.txt").read_text() == (out / "report.txt").read_text()

    compared = yardstick("compare", str(out), str(tmp_path / "log"))
    assert compared.returncode == 0, compared.stderr
    document = json.loads(compared.stdout.splitlines()[-1])
    assert set(document["ratios"].values()) == {1.0}
    assert document["differences"] == {}


def test_an_objective_that_is_not_met_is_exit_code_1(tmp_path: Path) -> None:
    with serving(good) as url:
        done = yardstick("run", "--url", url, "--rate", "10", "--duration", "0.5", "--objective", "items_per_s >= 100000")
    assert done.returncode == 1, done.stderr
    assert "FAIL  items_per_s >= 100000" in done.stdout


@pytest.mark.slow
def test_a_key_comes_from_a_flag_or_a_file_and_is_not_recorded(gateway: Any, tmp_path: Path) -> None:
    url, key = gateway
    file = tmp_path / "key"
    file.write_text(f"{key}\n")
    for flags in (["--api-key", key], [f"--api-key={key}"], ["--api-key-file", str(file)]):
        done = yardstick("run", "--url", url, "--rate", "10", "--duration", "0.5", "--set", "workloads[0].vocab_size=300", *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert key not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "none.toml"], "cannot read none.toml: no such file or directory"),
        (["run", "--set", "arrivals.rat=1"], "did you mean `rate`?"),
        (["run", "--worker", "2/2"], "--worker 2/2: write it as INDEX/COUNT"),
        (["run", "--api-key", "two words"], "the API key has characters"),
        (["run", "--api-key-file", "none"], "--api-key-file none cannot be read"),
        (["run", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["report", "none"], "cannot read none"),
        (["compare", "none", "none"], "cannot read none"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["yardstick load", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("yardstick load: ")
    assert says in line


def test_the_guides_examples_are_scenarios(tmp_path: Path) -> None:
    from yardstick_llm.loadgen.scenario import load

    guide = (ROOT / "docs" / "load.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", guide, flags=re.S)
    assert examples
    for place, example in enumerate(examples):
        file = tmp_path / f"{place}.toml"
        file.write_text(example)
        assert load(file)
        assert tomllib.loads(example)


def test_the_guide_has_every_key() -> None:
    from yardstick_llm.loadgen.scenario import structs_at

    guide = (ROOT / "docs" / "load.md").read_text()
    paths = ("", "target", "arrivals", "arrivals.stages", "workloads", "workloads.data", "workloads.items")
    for kind in (kind for path in paths for kind in structs_at(path)):
        for field in kind.__struct_fields__:
            assert f"`{field}`" in guide, f"{kind.__name__}.{field}"
