"""The command line where it needs no server."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.gateway.commands.conftest import Yardstick, full_disk, the_one_line
from tests.gateway.keys import entry
from tests.processes import free_port
from yardstick_llm.engine.server.options import parse
from yardstick_llm.gateway.commands.files import replace_file
from yardstick_llm.gateway.commands.processes import Child, Supervisor, stop
from yardstick_llm.gateway.commands.serve import ServeOptions, _engine_arguments, _Models, gateway_settings
from yardstick_llm.gateway.http.auth import KeyRing
from yardstick_llm.gateway.presets.preset import builtin
from yardstick_llm.gateway.settings import Settings

HEAVY = ("torch", "litestar", "httpx", "tokenizers", "engine", "numpy")


def test_help_imports_nothing_heavy() -> None:
    program = f"""
import sys
from yardstick_llm.gateway import cli
sys.argv = ["yardstick", "--help"]
try:
    cli.main()
except SystemExit as end:
    assert end.code == 0
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].strip() == "imported:"


@pytest.mark.parametrize(("command", "module"), [("gateway", "gateway"), ("engine", "engine"), ("load", "loadgen")])
def test_commands_become_programs(yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch, command: str, module: str) -> None:
    """The variables for clients go to clients only: a gateway would take them for settings of its own, and refuse them."""
    seen: list[tuple[list[str], Mapping[str, str]]] = []
    monkeypatch.setattr(
        "yardstick_llm.gateway.commands.processes.os.execve", lambda _, command, environment: seen.append((command, environment))
    )
    for variable in ("YARDSTICK_API_KEY", "YARDSTICK_LOAD_KEY"):
        monkeypatch.setenv(variable, "sk")
    yardstick(command, "--port", "1", "--help")
    ((program, environment),) = seen
    assert program == [sys.executable, "-m", f"yardstick_llm.{module}", "--port", "1", "--help"]
    assert {variable in environment for variable in ("YARDSTICK_API_KEY", "YARDSTICK_LOAD_KEY")} == {module == "loadgen"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--dtype", "int4"], ["--dtype", "bfloat16"]),
        (["--max-totl-tokens", "9"], ["--max-totl-tokens", "yardstick engine --help"]),
        (["--token=t"], ["chooses --token itself"]),
        (["--engines", "0"], ["--engines", "greater than or equal to 1"]),
        (["--engines", "65"], ["--engines", "less than or equal to 64"]),
        (["--engines", "2", "--health-port", "8101"], ["--health-port names one port", "--engines 2"]),
        (["--port", "0"], ["--port"]),
        (["a.gguf", "--model", "b.gguf"], ["a.gguf and --model b.gguf name two models"]),
    ],
)
def test_a_wrong_option_of_serve_is_named(yardstick: Yardstick, given: list[str], words: list[str]) -> None:
    port = [] if "--port" in given else ["--port", str(free_port())]
    done = yardstick("serve", *port, *given)
    assert done.status == 2
    assert "Traceback" not in done.err
    assert all(word in done.err for word in words)


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
    key = done.out.strip()
    assert len(key) > 40
    assert key not in done.err
    assert json.loads(file.read_text()) == {"keys": [{"name": "first", "sha256": hashlib.sha256(key.encode()).hexdigest()}]}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = yardstick("keys", "new", "second", "--file", str(file)).out.strip()
    ring = KeyRing(file)
    found = [ring.find(candidate) for candidate in (key, second, key + "x", "")]
    assert [entry and entry.name for entry in found] == ["first", "second", None, None]
    assert list(tmp_path.iterdir()) == [file], "no draft is left behind"
    before = file.read_text()
    again = yardstick("keys", "new", "first", "--file", str(file))
    assert (again.status, "first already" in the_one_line(again), file.read_text()) == (1, True, before)
    nowhere = yardstick("keys", "new", "me", "--file", str(tmp_path / "nowhere" / "keys.json"))
    assert (nowhere.status, "no such file or directory" in the_one_line(nowhere)) == (1, True)


def test_the_limits_of_a_new_key_are_written(yardstick: Yardstick, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    fields = {"requests_per_minute": 5, "tokens_per_minute": 6, "items_per_minute": 7, "concurrency": 8}
    fields |= {"group": "search", "weight": 2.5, "priority_min": -7, "priority_max": 3}  # type: ignore[dict-item]
    options = [text for name, value in fields.items() for text in (f"--{name.replace('_', '-')}", value)]
    new = ("keys", "new", "ci", "--file", file)
    done = yardstick(*new, "--model", "m", "--model", "n", "--expires", "2031-02-03", *options)
    (found,) = json.loads(file.read_text())["keys"]
    assert datetime.fromisoformat(found.pop("expires")) == datetime(2031, 2, 3, tzinfo=UTC)
    assert found == entry(done.out.strip()) | {"name": "ci", "models": ["m", "n"], **fields}
    assert yardstick(*new, "--concurrency", 0).status == 2
    refused = yardstick("keys", "new", "x", "--file", file, "--priority-min", 101)
    assert (refused.status, "`priority_min` 101 is greater than `priority_max` 100" in refused.err) == (1, True)


def test_a_file_of_keys_stays_what_the_gateway_can_read(yardstick: Yardstick, tmp_path: Path) -> None:
    """Its gateway may run as another user of its group, and find it through a link."""
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    link.symlink_to(file)
    yardstick("keys", "new", "first", "--file", str(link))
    file.chmod(0o640)
    if os.getuid() == 0:
        os.chown(file, 10, 20)
    before = file.stat()
    assert yardstick("keys", "new", "second", "--file", str(link)).status == 0
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert link.is_symlink()
    assert len(json.loads(file.read_text())["keys"]) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not a file of API keys"),
        ("[]", "not a file of API keys"),
        ('{"keys": 3}', "not a file of API keys"),
        ('{"keys": [{"name": "a"}]}', "has entries that do not count (keys[0]: "),
    ],
)
def test_a_file_that_holds_no_keys_is_left_alone(yardstick: Yardstick, tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    done = yardstick("keys", "new", "me", "--file", str(file))
    assert (done.status, words in the_one_line(done)) == (1, True)
    assert file.read_text() == content


def test_a_full_disk_keeps_the_keys(yardstick: Yardstick, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    yardstick("keys", "new", "first", "--file", str(file))
    before = file.read_bytes()
    with full_disk():
        done = yardstick("keys", "new", "second", "--file", str(file))
    assert (done.status, done.out) == (1, "")
    assert "cannot write" in done.err
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]
    assert file.read_bytes() == before
    assert yardstick("keys", "new", "second", "--file", str(file)).status == 0


def test_a_link_in_the_place_of_the_draft_is_not_followed(tmp_path: Path) -> None:
    """Where others may write to the directory, one of them could make it."""
    file, other = tmp_path / "keys.json", tmp_path / "other"
    other.write_text("unchanged")
    (tmp_path / f".keys.json.{os.getpid()}").symlink_to(other)
    replace_file(file, b"{}", mode=0o600)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"{}", 0o600)
    assert other.read_text() == "unchanged"
    assert not file.is_symlink()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["presets", "judge"], ["--version"], ["keys", "new", "second", "--file"]])
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys":[]}')
    command = [sys.executable, "-m", "yardstick_llm.gateway.cli", *command, *[str(file)] * (command[0] == "keys")]
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


def test_the_version(yardstick: Yardstick) -> None:
    done = yardstick("--version")
    assert (done.status, done.out) == (0, f"{version('yardstick-llm')}\n")


def test_presets_are_listed_printed_and_checked(yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = yardstick("presets").out
    assert all(f" {name} " in listed for name in builtin())
    assert "…" not in listed, "a pipe has 80 columns; names are folded, not cut"
    assert yardstick("presets", "zerank-2").out == builtin()["zerank-2"]
    file = tmp_path / "own.toml"
    file.write_text('name = "own"\ntask = "rerank"\ntemplate = ["{query}"]\n')
    checked, unknown = yardstick("presets", str(file)), yardstick("presets", "nothing")
    assert (checked.status, "{document} exactly once" in the_one_line(checked)) == (1, True)
    assert (unknown.status, "name one of" in the_one_line(unknown)) == (1, True)
