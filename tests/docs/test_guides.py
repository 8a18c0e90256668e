"""docs/troubleshooting.md quotes messages of the program, and the tables of docs/clients.md name options and paths that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.generate import PAGE
from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways
from yardstick_llm.gateway.cli import app

ROOT = Path(__file__).parents[2]
SETTINGS = PAGE.with_name("settings.md").read_text(encoding="utf-8")
OPERATIONAL = {"/metrics", "/health", "/"}


def cells(text: str, column: int) -> list[str]:
    rows = [
        re.split(r" (?<!\\)\| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ") and "| --- |" not in line
    ]
    return [row[column] for row in rows]


def messages() -> Iterator[str]:
    """Texts of the gateway's and the engine's code, with ``…`` in place of what is filled in."""
    for folder in ("gateway", "engine"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


@pytest.mark.slow
def test_each_message_of_troubleshooting_is_one_of_the_program() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## It answers")[0]
    quoted = [cell[1:-1] for cell in cells(page, 0) if cell != "message"]
    assert len(quoted) > 30
    known = "\n".join(messages())
    patterns = {text: ".*".join(map(re.escape, text.split("…"))) for text in quoted}
    assert [text for text, pattern in patterns.items() if not re.search(pattern, known)] == []


@pytest.mark.slow
def test_what_replaces_options_and_paths_exists() -> None:
    (part,) = re.findall(r"<!-- migrating -->\n(.*?)<!-- end -->", PAGE.with_name("clients.md").read_text(encoding="utf-8"), re.S)
    here = " ".join(re.findall(r"`([^`]+)`", " ".join(cells(part, -1))))
    helps = [CliRunner().invoke(app, [*command, "--help"]).output for command in (["serve"], ["keys", "new"])]
    options = set(re.findall(r"--[a-z][a-z-]+", " ".join([*helps, SETTINGS])))
    variables = set(re.findall(r"YARDSTICK_\w+", SETTINGS))
    with gateways() as start:
        paths = set(start(FakeEngine()).get("/schema/openapi.json").json()["paths"]) | OPERATIONAL
    named = [set(re.findall(pattern, here)) for pattern in (r"--[a-z][a-z-]+", r"YARDSTICK_\w+", r"(?<!\S)/\S*")]
    assert [len(found) > least for found, least in zip(named, (30, 7, 20), strict=True)] == [True] * 3
    assert [found - known for found, known in zip(named, (options, variables, paths), strict=True)] == [set(), set(), set()]
