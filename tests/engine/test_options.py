"""The command line is that of engine/settings.py, and ``yardstick serve`` passes it on."""

from __future__ import annotations

import pytest
import typer

from yardstick_llm.engine.server.options import options_of, parse
from yardstick_llm.engine.settings import EngineSettings, ServerSettings
from yardstick_llm.gateway import cli

OPTIONS = {option.name: option for settings in (EngineSettings, ServerSettings) for option in options_of(settings)}


def test_defaults_are_those_of_the_structs() -> None:
    assert parse(["--model", "some/where"]) == (EngineSettings(model="some/where", name="where"), ServerSettings())


def test_every_option_reaches_its_setting() -> None:
    given = {"model": "m", "name": "n", "lenvm_gamma": 0.5, "dtype": "float16", "max_batched_tokens": 7, "stall_seconds": 2.5}
    server = {"host": "::1", "port": 0, "health_port": 81, "token_file": "t", "grace_seconds": 0.0}
    line = [f"--{name.replace('_', '-')}={value}" for name, value in (given | server).items()]
    assert parse(line) == (EngineSettings(**given), ServerSettings(**server))


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--max-running-requests", "0", "must be at least 1"),
        ("--lenvm-gamma", "1", "must be greater than 0 and less than 1"),
        ("--stall-seconds", "nan", "must be greater than 0 and less than 1e+09"),
        ("--max-batched-tokens", "many", "invalid int value: 'many'"),
        ("--token-budget", "5", "unrecognized arguments"),
    ],
)
def test_errors_name_the_option(flag: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", flag, value])
    error = capsys.readouterr().err
    assert flag in error
    assert problem in error


def test_serve_has_no_option_of_the_engine_but_its_own() -> None:
    """All others are passed on, so that they are defined once. Host and port are the gateway's."""
    own = {parameter.opts[0] for parameter in typer.main.get_command(cli.app).commands["serve"].params}  # type: ignore[attr-defined]
    assert own & {option.flag for option in OPTIONS.values()} == {"--model", "--lenvm-model", "--host", "--port"}


def test_the_beginning_of_a_name_is_enough() -> None:
    """The chart of version 0.1.0 gives ``--max-running``."""
    settings, _ = parse(["--model", "m", "--max-running=7"])
    assert settings.max_running_requests == 7
