"""``yardstick serve``, as real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.checkpoints import make_checkpoint
from tests.fakes import FakeEngine
from tests.fakes import served as fake_served
from tests.gateway.answers import printed_by
from tests.gateway.commands.conftest import Yardstick, the_one_line
from tests.gateway.conftest import Start, gateways
from tests.parts import need
from tests.processes import alive, free_port, wait_until
from tests.warm import as_in_production
from yardstick_llm.gateway.commands.serve import ITEMS as ITEMS_SHOWN
from yardstick_llm.gateway.commands.serve import abilities_of, example_body, show_calls

YARDSTICK = [sys.executable, "-m", "yardstick_llm.gateway.cli"]
START_SECONDS = 60
END_SECONDS = 20


@dataclass
class Served:
    """A running ``yardstick serve``; its standard output and error are files."""

    process: subprocess.Popen[bytes]
    url: str
    out: Path
    err: Path

    @property
    def descendants(self) -> set[int]:
        """Process ids of all that it started, and that those started."""
        found, new = set[int](), {self.process.pid}
        while new:
            parents, new = new, set[int]()
            for stat in Path("/proc").glob("[0-9]*/stat"):
                if parent_of(stat) in parents:
                    new.add(int(stat.parent.name))
            found |= new
        return found


def parent_of(stat: Path) -> int | None:
    """The parent of a process, None where the process is gone."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def start(directory: Path, *arguments: str, **environment: str) -> Served:
    """Start serving in ``directory`` and return when it serves."""
    port = free_port()
    out, err = directory / "out.txt", directory / "err.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [*YARDSTICK, "serve", "--port", str(port), *arguments]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=variables)

    def serves() -> bool:
        assert process.poll() is None, err.read_text()
        return "Serving; press Ctrl-C" in err.read_text()

    wait_until(serves, START_SECONDS)
    return Served(process, f"http://127.0.0.1:{port}", out, err)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@contextmanager
def serving(directory: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    served = start(directory, *arguments, **environment)
    try:
        yield served
    finally:
        served.process.terminate()
        assert served.process.wait(END_SECONDS) == 0


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--model", str(model)) as served:
        yield served


def run_shown(text: str) -> tuple[str, Any, str]:
    """The curl command that is shown, its answer, and what the shown program prints."""
    need("curl")
    (line,) = [line for line in text.splitlines() if line.startswith("curl ")]
    answer = json.loads(subprocess.run(shlex.split(line), capture_output=True, check=True, timeout=30).stdout)
    return line, answer, printed_by(text[text.index("from openai import") :])


def test_the_calls_that_are_shown_work(served: Served) -> None:
    _, answer, printed = run_shown(served.out.read_text())
    assert len(answer["scores"]) == len(example_body("")["items"])
    assert all(sum(scores) == pytest.approx(1) for scores in answer["scores"])
    assert "'object': 'scoring'" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classifier", "embedder"])
def test_the_calls_that_are_shown_are_those_of_the_models_task(
    start_gateway: Start, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    classifies = kind == "classifier"
    fields = {"capabilities": ("classify",), "classes": ("a", "b", "c")} if classifies else {"capabilities": ("embed",)}
    engine = FakeEngine(kind, embedding_size=8, **fields)  # type: ignore[arg-type]
    url = str(start_gateway(engine).base_url).rstrip("/")
    show_calls(Console(width=300), url, kind, abilities_of(engine.url, {}), with_key=False)
    text = capsys.readouterr().out
    line, answer, printed = run_shown(text)
    assert f"{url}{'/v1/classify' if classifies else '/v1/embeddings'} " in line
    assert len(answer["data"]) == len(ITEMS_SHOWN)
    assert printed.startswith("{'" if classifies else "[")
    assert "chat" not in text


@pytest.fixture
def start_gateway() -> Iterator[Start]:
    with gateways() as starting:
        yield starting


def test_no_call_is_shown_for_a_model_whose_prompt_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_served(FakeEngine("my-rerank", capabilities=("classify",), classes=("relevance",))) as url:
        show_calls(Console(), url, "my-rerank", abilities_of(url, {}), with_key=False)
    shown = capsys.readouterr().out
    assert ("choose one with --preset" in shown, "curl" in shown) == (True, False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("demo")) as served:
        yield served


def test_the_demo_model_is_ready_soon_and_shows_what_it_can_do(demo: Served) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (steering,) = [block for block in re.findall(r"```python\n(.*?)```", readme, flags=re.S) if "length_guidance" in block]
    text = demo.out.read_text()
    for program in (steering.replace("http://127.0.0.1:8000", demo.url), text[text.index("from openai import") :]):
        tokens, _, words = printed_by(program).splitlines()[-1].partition(" ")
        assert 20 <= int(tokens) <= 60
        assert words.startswith("A ")
    (seconds,) = re.findall(r"Ready after ([\d.]+) s", demo.err.read_text())
    assert float(seconds) < 30, "a few seconds on a quiet machine"
    rows = re.findall(r"^│ ([a-z ]+?) +│ +([\d.]+) │ +([\d.]+) │$", text, flags=re.M)
    assert {item for item, *_ in rows} == set(ITEMS_SHOWN)
    assert all(float(yes) + float(no) == pytest.approx(1, abs=1e-3) for _, yes, no in rows)
    assert [yes for _, yes, _ in rows] == sorted((yes for _, yes, _ in rows), reverse=True)
    assert {item for item, *_ in rows[:2]} == {"crimson jogging sneakers", "scarlet running trainers"}


CLIENTS = Path(__file__).parents[3] / "examples" / "clients"


@pytest.mark.slow
def test_the_example_clients(demo: Served) -> None:
    said: dict[str, list[str]] = {}
    others = {CLIENTS / "adapter.py", CLIENTS / "image.py"}  # they need an engine with adapters, or one that reads images
    for path in {*CLIENTS.glob("*.py"), *CLIENTS.glob("*.sh")} - others:
        if path.suffix == ".py":
            told = printed_by(path.read_text(), demo.url)
        else:
            told = subprocess.run([str(path), demo.url], capture_output=True, text=True, timeout=60, check=True).stdout
        said[path.name] = told.splitlines()
    assert said.pop("score.py")[0].endswith(" crimson jogging sneakers")
    (blue, _), (crimson, _) = json.loads(said.pop("score.sh")[0])["scores"]
    assert blue < 0.5 < crimson
    assert said.pop("chat.py")[-1].startswith("stop ")
    stream = said.pop("stream.py")
    assert len(stream) == 20
    assert all(re.fullmatch(r"'.*' [01]\.\d{3} of \{.*\}", line) for line in stream)
    lengths = [int(line.split()[1]) for line in said.pop("length_guidance.py")]
    assert lengths == sorted(lengths)
    assert lengths[0] < 40 < lengths[2]
    assert said == {}, "each client is checked here"


def test_a_port_in_use_is_one_line_before_anything_is_loaded(yardstick: Yardstick) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = yardstick("serve", "--port", port, "--model", "/no/such/model")
    assert done.status == 1
    assert f"cannot listen on 127.0.0.1 port {port} (address already in use)" in the_one_line(done)


@pytest.mark.slow
def test_what_a_program_refuses_is_its_one_line(yardstick: Yardstick, tmp_path: Path, model: Path) -> None:
    broken, keys = tmp_path / "broken", tmp_path / "keys.json"
    shutil.copytree(model, broken)
    (broken / "tokenizer.json").write_text('{"model": 3}')
    keys.write_text("{}")
    for arguments, words in (
        (["--model", tmp_path / "nowhere"], "nowhere is not a directory; give a model directory or a hub id"),
        ([tmp_path / "nowhere.gguf", "--dtype", "float32"], "There is no file"),
        (["--model", broken], "tokenizer.json cannot be read"),
        (["--model", model, "--api-keys-file", keys], "not a file of API keys"),
        (["--host", "0.0.0.0"], "yardstick keys new NAME --file keys.json"),
    ):
        done = yardstick("serve", "--port", free_port(), *arguments)
        lines = [line for line in done.err.splitlines() if not line.startswith("Loading ")]
        assert (done.status, len(lines), words in lines[0]) == (1, 1, True), done.err


def upload(served: Served) -> tuple[socket.socket, bytes]:
    """A request whose body has not arrived: a connection, and the rest to send."""
    body = json.dumps({"query": "the red", "items": [" shoes"] * 20, "labels": [" Yes"]}).encode()
    host, _, port = served.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=END_SECONDS)
    head = f"POST /v1/score HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:1])
    return connection, body[1:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; other kernels have no death signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_however_it_ends_every_process_ends(model: Path, tmp_path: Path, number: int) -> None:
    """After Ctrl-C, an open request has longer than ten seconds."""
    with as_in_production():
        served = start(tmp_path, "--model", str(model))
    descendants = served.descendants
    assert len(descendants) >= 3, "gateway, engine, and the engine's loop"
    connection, rest = upload(served)
    time.sleep(0.3)
    served.process.send_signal(number)
    if number == signal.SIGINT:
        for place in range(11):
            time.sleep(1)
            connection.sendall(rest[place : place + 1])
        connection.sendall(rest[11:])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.close()
    assert served.process.wait(END_SECONDS) == (0 if number == signal.SIGINT else -number)
    wait_until(lambda: not any(map(alive, descendants)), END_SECONDS)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(served.url.rpartition(":")[2])))


@pytest.mark.slow
def test_the_environment_sets_up_the_gateway_and_options_win(yardstick: Yardstick, model: Path, tmp_path: Path) -> None:
    """And warnings of an engine that loads are shown."""
    keys = tmp_path / "keys.json"
    key = yardstick("keys", "new", "me", "--file", keys).out.strip()
    settings = {"MAX_BODY_BYTES": "1000", "PORT": "1", "HOST": "127.0.0.1", "API_KEYS_FILE": str(keys)}
    environment = {f"YARDSTICK_{name}": value for name, value in settings.items()} | {"YARDSTICK_API_KEY": key}
    headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
    with serving(tmp_path, "--model", str(model), "--quantize", "fp8", "--device", "cpu", **environment) as served:
        assert httpx.post(f"{served.url}/v1/score", json={"query": "x" * 2000}, headers=headers).status_code == 413
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        wait_until(lambda: '"id":"mine","key":"me"' in served.err.read_text())
    assert "$YARDSTICK_API_KEY" in served.out.read_text()
    before, _, _ = served.err.read_text().partition("Ready after")
    (line,) = [line for line in before.splitlines() if "WARNING" in line and "--quantize" in line]
    assert re.match(r"engine: .* --quantize fp8 is emulated on a CPU: .*; use --quantize int8$", line), line


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("YARDSTICK_ENGINES", "http://127.0.0.1:8100", "`yardstick serve` starts the engine itself; unset it"),
        ("YARDSTICK_NO_SUCH_SETTING", "1", "YARDSTICK_NO_SUCH_SETTING: there is no such setting"),
        ("YARDSTICK_MAX_IN_FLIGHT", "none", "YARDSTICK_MAX_IN_FLIGHT: 'none' does not fit"),
        ("YARDSTICK_HOST", "0.0.0.0", "`yardstick keys new NAME --file keys.json`"),
    ],
)
def test_a_wrong_environment_is_one_line_before_anything_is_loaded(
    yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = yardstick("serve", "--port", free_port(), "--model", "/no/such/model")
    assert (done.status, words in the_one_line(done)) == (1, True)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    served = start(tmp_path, "--model", str(model))
    descendants = served.descendants
    connection, _ = upload(served)
    time.sleep(0.3)
    served.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert served.process.poll() is None, "it waits for the open request"
    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(END_SECONDS) == 0
    assert time.monotonic() - began < 15, "it does not wait for the grace period of 30 s"
    wait_until(lambda: not any(map(alive, descendants)), END_SECONDS)
    connection.close()
    assert "open requests have 30 s to end. Press Ctrl-C again" in served.err.read_text()
