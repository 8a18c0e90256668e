"""``yardstick serve --engines``: several engines behind one gateway. Most tests run real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.gateway.commands.test_cli_serve import END_SECONDS, Served, start
from tests.processes import alive, wait_until
from tests.warm import as_in_production
from yardstick_llm.engine.server.options import parse
from yardstick_llm.gateway.commands import CommandError, WrongUsage
from yardstick_llm.gateway.commands import serve as command
from yardstick_llm.gateway.commands.processes import Stop, signals_raise_stop
from yardstick_llm.gateway.commands.serve import (
    VISIBLE,
    ServeOptions,
    engine_programs,
    gateway_settings,
    gpus_of_engines,
    models_of,
    splitting,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


def score(url: str, query: int, items: int = 2) -> list[list[float]]:
    body = {"query": [query] * 20, "items": [[item + 1] * 100 for item in range(items)], "label_token_ids": [1, 2]}
    return httpx.post(f"{url}/v1/score", json=body, timeout=30).raise_for_status().json()["scores"]


def engine_urls(served: Served) -> list[str]:
    """URLs of the engines that the gateway knows."""
    text = httpx.get(f"{served.url}/metrics").text
    return sorted(set(re.findall(r'yardstick_engine_requests_in_flight\{engine="(http[^"]+)"', text)))


def steps_of(url: str) -> float:
    """Steps that an engine has computed."""
    (steps,) = re.findall(r"^yardstick_engine_steps_total (\S+)$", httpx.get(f"{url}/metrics").text, flags=re.M)
    return float(steps)


def sub_batches(served: Served) -> float:
    """Messages to engines for score requests."""
    (total,) = re.findall(r"^yardstick_sub_batches_sum (\S+)$", httpx.get(f"{served.url}/metrics").text, flags=re.M)
    return float(total)


def engine_pids(served: Served) -> list[int]:
    return sorted(pid for pid in served.descendants if b"-m\0yardstick_llm.engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.slow
@linux
def test_all_engines_serve_and_one_that_ends_is_named_and_ends_the_rest(model: Path, tmp_path: Path) -> None:
    with as_in_production():
        served = start(tmp_path, "--model", str(model), "--engines", "2", "--device", "cpu")
    urls, descendants = engine_urls(served), served.descendants
    assert len(urls) == 2
    before = [steps_of(url) for url in urls]
    queries = count(1)

    def both_compute() -> bool:
        with ThreadPoolExecutor(8) as threads:
            scores = list(threads.map(lambda query: score(served.url, query), islice(queries, 24)))
        assert all(len(rows) == 2 for rows in scores)
        return all(steps_of(url) > steps for url, steps in zip(urls, before, strict=True))

    try:
        wait_until(both_compute, 20)  # the gateway may learn only a second after the start that an engine is ready
        messages = sub_batches(served)
        score(served.url, 100, items=20)
        assert sub_batches(served) == messages + 2, "a lone request is divided among the idle engines"
        _, second = engine_pids(served)
        os.kill(second, signal.SIGKILL)
        assert served.process.wait(END_SECONDS) == 1
    finally:
        served.process.kill()  # after a failure; its programs end with it
    assert "engine 2 has ended: killed by SIGKILL" in served.err.read_text().splitlines()[-1]
    wait_until(lambda: not any(map(alive, descendants)), END_SECONDS)


def test_each_engine_has_a_port_and_a_share_of_the_machine() -> None:
    options = ServeOptions(model="/m", engines=3, engine=["--lora", "a=/a"])
    settings = gateway_settings(options, {"YARDSTICK_TRACING_ENDPOINT": "http://127.0.0.1:4318"})
    programs = engine_programs(options, settings, models_of(options), ["0", "1", "2"])
    assert [program.name for program in programs] == ["engine 1", "engine 2", "engine 3"]
    assert [program.variables for program in programs] == [{VISIBLE: "0"}, {VISIBLE: "1"}, {VISIBLE: "2"}]
    parsed = [parse(program.arguments[1:]) for program in programs]
    assert [f"http://{server.host}:{server.port}" for _, server in parsed] == list(settings.engines)
    assert len({*settings.engines}) == 3
    assert {server.tracing_endpoint for _, server in parsed} == {"http://127.0.0.1:4318"}
    assert all((engine.name, engine.lora, engine.machine_engines) == ("m", ["a=/a"], 3) for engine, _ in parsed)


@pytest.mark.parametrize(
    ("visible", "environment", "expected"),
    [
        ([None, None], {}, {"YARDSTICK_IDLE_SPLIT_TOKENS": "512"}),
        ([None], {}, {}),
        (["0", "1"], {}, {}),
        ([None, None], {"YARDSTICK_SPLIT_TOKENS": "4096"}, {}),
        ([None, None], {"YARDSTICK_IDLE_SPLIT_TOKENS": "9"}, {}),
    ],
)
def test_idle_engines_on_a_cpu_share_smaller_requests(
    visible: Sequence[str | None], environment: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    assert splitting(visible, environment) == expected


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """An environment in which the process that asks torch finds a build with CUDA and four GPUs."""
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 4)\n")
    monkeypatch.setattr(command, "version", lambda _: "2.13.0")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


class Division(NamedTuple):
    engines: int
    arguments: Sequence[str]
    visible: str | None
    """The variable as the user has set it."""
    expected: Sequence[str | None]


DIVISIONS = {
    "one": Division(1, [], None, [None]),
    "one for each": Division(3, [], None, ["0", "1", "2"]),
    "tensor parallel": Division(2, ["--tensor-parallel=2", "--dtype", "bfloat16"], None, ["0,1", "2,3"]),
    "names of the user": Division(2, ["--device", "cuda"], "GPU-b, GPU-a,7,MIG-c", ["GPU-b", "GPU-a"]),
    "on the CPU": Division(8, ["--lora", "a=/a", "--device=cpu"], None, [None] * 8),
    "a wrong value": Division(2, ["--tensor-parallel", "two"], None, ["0", "1"]),
    "no value": Division(2, ["--device"], None, ["0", "1"]),
}


@pytest.mark.parametrize("division", DIVISIONS.values(), ids=DIVISIONS)
def test_each_engine_has_its_own_gpus(four_gpus: Mapping[str, str], division: Division) -> None:
    environment = dict(four_gpus) | ({} if division.visible is None else {VISIBLE: division.visible})
    assert gpus_of_engines(division.engines, division.arguments, environment) == division.expected


@pytest.mark.parametrize(
    ("engines", "arguments", "words"),
    [
        (5, [], "--engines 5 needs 5 GPUs, and torch finds 4; lower --engines, or add --device cpu"),
        (3, ["--tensor-parallel", "2"], "--engines 3 of 2 GPUs each (--tensor-parallel) needs 6 GPUs, and torch finds 4"),
    ],
)
def test_too_few_gpus_are_refused(four_gpus: Mapping[str, str], engines: int, arguments: Sequence[str], words: str) -> None:
    with pytest.raises(WrongUsage) as caught:
        gpus_of_engines(engines, arguments, four_gpus)
    assert str(caught.value).startswith(words)


def test_without_gpus_all_engines_share_the_cpu(four_gpus: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "version", lambda _: "2.13.0+cpu")
    assert gpus_of_engines(2, [], four_gpus) == [None, None]


def test_gpus_that_cannot_be_counted_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hang."""
    monkeypatch.setattr(command, "version", lambda _: "2.13.0")
    monkeypatch.setattr(command, "_COUNT", "import time; time.sleep(60)")
    monkeypatch.setattr(command, "_COUNT_SECONDS", 0.1)
    with pytest.raises(CommandError, match="check the driver, or add --device cpu"):
        gpus_of_engines(2, [], os.environ)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_an_event_loop_is_not_lost(number: int) -> None:
    """A command that has just started to serve sends an example."""

    async def send() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        await asyncio.sleep(5)

    with signals_raise_stop(), pytest.raises(Stop) as stop:
        asyncio.run(send())
    assert stop.value.number == number
