"""The command line where it needs no server."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.options import parse
from gateway import cli
from gateway.auth.keyring import KeyRing
from gateway.commands import CommandError
from gateway.commands.files import replace_file
from gateway.commands.lists import Results, write
from gateway.commands.processes import Child, Supervisor, become, stop
from gateway.commands.serve import ServeOptions, _engine_arguments, _Models, gateway_settings
from gateway.settings import Settings
from tests.processes import free_port

HEAVY = ("torch", "litestar", "httpx", "tokenizers", "engine", "numpy")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Yardstick = Callable[..., Done]


@pytest.fixture
def yardstick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Yardstick:
    """:func:`run` in this process, as the console script does."""

    def run_here(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["yardstick", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            return Done(int(end.code or 0), *capsys.readouterr())
        return Done(0, *capsys.readouterr())

    return run_here


@pytest.fixture
def becomes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Mapping[str, str]]]:
    """Commands and environments of the programs that this process would become."""
    seen: list[tuple[list[str], Mapping[str, str]]] = []
    monkeypatch.setattr("gateway.commands.processes.os.execve", lambda _, command, environment: seen.append((command, environment)))
    return seen


def test_help_imports_nothing_heavy() -> None:
    program = f"""
import sys
from gateway import cli
sys.argv = ["yardstick", "--help"]
try:
    cli.main()
except SystemExit as end:
    assert end.code == 0
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].strip() == "imported:"


@pytest.mark.parametrize("command", ["serve", "score", "keys", "rerank", "embed", "batch", "catalogue"])
def test_every_subcommand_explains_itself(yardstick: Yardstick, command: str) -> None:
    done = yardstick(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert command in yardstick("--help").stdout


@pytest.mark.parametrize(
    "command", [pytest.param("gateway", marks=pytest.mark.slow), pytest.param("engine", marks=pytest.mark.slow), "load"]
)
def test_every_program_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert command in run("--help").stdout


@pytest.mark.parametrize(("command", "module"), [("gateway", "gateway"), ("engine", "engine"), ("load", "loadgen")])
def test_commands_become_programs(
    yardstick: Yardstick, becomes: list[tuple[list[str], Mapping[str, str]]], command: str, module: str
) -> None:
    yardstick(command, "--port", "1", "--help")
    ((program, _),) = becomes
    assert program == [sys.executable, "-m", module, "--port", "1", "--help"]


@pytest.mark.slow
def test_arguments_of_engine_and_gateway_are_passed_on() -> None:
    assert "--max-batched-tokens" in run("engine", "--help").stdout
    assert run("engine", "--no-such-flag").returncode == 2
    assert "no engine is named" in run("gateway", "--port", "0").stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(["--dtype", "int4"], ["--dtype", "bfloat16"], marks=pytest.mark.slow),
        pytest.param(["--quantize=int3"], ["--quantize", "fp8"], marks=pytest.mark.slow),
        (["--max-totl-tokens", "9"], ["--max-totl-tokens", "yardstick engine --help"]),
        (["--token=t"], ["chooses --token itself"]),
        (["--machine-engines", "2"], ["chooses --machine-engines itself"]),
        (["--engines", "0"], ["--engines", "greater than or equal to 1"]),
        pytest.param(["--engines", "65"], ["--engines", "less than or equal to 64"], marks=pytest.mark.slow),
        (["--engines", "2", "--health-port", "8101"], ["--health-port names one port", "--engines 2"]),
        (["--port", "0"], ["--port"]),
    ],
)
def test_a_wrong_option_of_serve_is_named(given: list[str], words: list[str]) -> None:
    port = [] if "--port" in given else ["--port", str(free_port())]
    done = run("serve", *port, *given)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)


def test_other_options_reach_the_engine() -> None:
    given = ("--dtype", "bfloat16", "--lora", "support=/adapters/support", "--lora=sql=org/sql")
    options = ServeOptions(model="m", engine=given)
    arguments = _engine_arguments(options, _Models("m", None), 8100)
    assert tuple(arguments[-5:]) == given
    _, server = parse(arguments[1:])
    assert server.port == 8100


@pytest.mark.parametrize("given", [("--name", "own"), ("--dtype", "float32", "--name=own")])
def test_a_name_is_passed_on_and_is_that_of_the_gateways_settings(given: tuple[str, ...]) -> None:
    options = ServeOptions(model="m", engine=given, preset="judge")
    engine, _ = parse(_engine_arguments(options, _Models("m", None), 8100)[1:])
    assert (options.name, engine.name) == ("own", "own")
    assert gateway_settings(options, {}).presets == ("own=judge",)


def test_a_key_is_printed_once_and_kept_as_a_hash(yardstick: Yardstick, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    done = yardstick("keys", "new", "first", "--file", str(file))
    key = done.stdout.strip()
    assert len(key) > 40
    assert key not in done.stderr
    assert json.loads(file.read_text()) == {"keys": [{"name": "first", "sha256": hashlib.sha256(key.encode()).hexdigest()}]}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = yardstick("keys", "new", "second", "--file", str(file)).stdout.strip()
    ring = KeyRing(file)
    found = [ring.find(candidate) for candidate in (key, second, key + "x", "")]
    assert [entry and entry.name for entry in found] == ["first", "second", None, None]
    assert list(tmp_path.iterdir()) == [file], "no draft is left behind"


def test_a_name_is_taken_once(yardstick: Yardstick, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    yardstick("keys", "new", "me", "--file", str(file))
    before = file.read_text()
    done = yardstick("keys", "new", "me", "--file", str(file))
    assert done.returncode == 1
    assert done.stderr.startswith("yardstick: ")
    assert "me already" in done.stderr
    assert file.read_text() == before


def test_a_file_of_keys_stays_what_the_gateway_can_read(yardstick: Yardstick, tmp_path: Path) -> None:
    """Its gateway may run as another user of its group, and find it through a link."""
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    link.symlink_to(file)
    yardstick("keys", "new", "first", "--file", str(link))
    file.chmod(0o640)
    if os.getuid() == 0:
        os.chown(file, 10, 20)
    before = file.stat()
    assert yardstick("keys", "new", "second", "--file", str(link)).returncode == 0
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert link.is_symlink()
    assert len(json.loads(file.read_text())["keys"]) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"keys": 3}'])
def test_a_file_that_holds_no_keys_is_left_alone(yardstick: Yardstick, tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    done = yardstick("keys", "new", "me", "--file", str(file))
    assert done.returncode == 1
    assert "not a file of API keys" in done.stderr
    assert file.read_text() == content


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process may have 50 bytes, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_keys(yardstick: Yardstick, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    yardstick("keys", "new", "first", "--file", str(file))
    before = file.read_bytes()
    with full_disk():
        done = yardstick("keys", "new", "second", "--file", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot write" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]
    assert file.read_bytes() == before
    assert yardstick("keys", "new", "second", "--file", str(file)).returncode == 0


def test_a_link_in_the_place_of_the_draft_is_not_followed(tmp_path: Path) -> None:
    """Where others may write to the directory, one of them could make it."""
    file, other = tmp_path / "keys.json", tmp_path / "other"
    other.write_text("unchanged")
    (tmp_path / f".keys.json.{os.getpid()}").symlink_to(other)
    replace_file(file, b"{}", mode=0o600)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"{}", 0o600)
    assert other.read_text() == "unchanged"
    assert not file.is_symlink()


@pytest.mark.parametrize("command", [["presets", "judge"], ["--version"], ["keys", "new", "second", "--file"]])
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys":[]}')
    command = [sys.executable, "-m", "gateway.cli", *command, *[str(file)] * (command[0] == "keys")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"yardstick: .*no space left on device\n", done.stderr)
    assert json.loads(file.read_text()) == {"keys": []}, "a key that was not shown is not kept"


def test_programs_are_read_on_while_their_lines_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an engine blocks as soon as its pipe is full."""
    children = Child("engine", ["this"]), Child("gateway", ["this"])
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        supervisor = Supervisor(children[:1], children[1], Settings(engines=("http://127.0.0.1:9",)))
        supervisor._talkative = True
        supervisor._on_line(children[0], "a line")
        supervisor.say_stopping()
    stop(children, 10)
    for child in children:
        child.read_to_the_end()


def test_a_full_disk_keeps_earlier_results(tmp_path: Path) -> None:
    output, found = tmp_path / "scores.json", Results("m", ["Yes"], ["a", "b"], [[0.25], [0.5]], 4)
    write(found, "json", output)
    before = output.read_bytes()
    with full_disk(), pytest.raises(CommandError, match="cannot write"):
        write(found, "json", output)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.json"]
    assert output.read_bytes() == before
    link = tmp_path / "link"
    link.symlink_to(output)
    write(found, "csv", link)
    assert output.read_text() == "item,Yes\na,0.25\nb,0.5\n"
    assert link.is_symlink()


def test_a_directory_that_is_not_there_is_one_line(yardstick: Yardstick, tmp_path: Path) -> None:
    done = yardstick("keys", "new", "me", "--file", str(tmp_path / "nowhere" / "keys.json"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no such file or directory" in done.stderr


@pytest.mark.parametrize("variable", ["YARDSTICK_API_KEY", "YARDSTICK_LOAD_KEY"])
@pytest.mark.parametrize(("module", "kept"), [("gateway", False), ("engine", False), ("benchmarks", True), ("loadgen", True)])
def test_the_key_goes_to_clients_only(
    monkeypatch: pytest.MonkeyPatch, becomes: list[tuple[list[str], Mapping[str, str]]], module: str, kept: bool, variable: str
) -> None:
    """A gateway would take the variable for a setting of its own, and refuse it."""
    monkeypatch.setenv(variable, "sk")
    become(module, ["--help"])
    ((program, environment),) = becomes
    assert program[1:] == ["-m", module, "--help"]
    assert (variable in environment) == kept


def test_the_version(yardstick: Yardstick) -> None:
    done = yardstick("--version")
    assert (done.returncode, done.stdout) == (0, f"{version('yardstick-llm')}\n")
