"""``docs/clients.md`` shows the programs that the tests run, with the versions that are pinned."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.environments import PINS, SCRIPTS

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
UNSHOWN = {"lmeval_reference.py", "manifests_validate.mjs", "sentence_reference.py", "sentence_saved.py"}
"""Scripts that are no client of a server."""


def test_the_page_shows_each_script() -> None:
    shown = re.findall(r"^```\w+\n(.*?)^```$", PAGE, flags=re.M | re.S)
    scripts = {path.name: path.read_text(encoding="utf-8") for path in SCRIPTS.iterdir() if path.is_file()}
    assert sorted(shown) == sorted(text for name, text in scripts.items() if name not in UNSHOWN)


def test_the_page_names_the_pinned_versions() -> None:
    pins = " ".join(path.read_text(encoding="utf-8") for path in PINS.iterdir()).replace("@", "==").split()
    pins += re.findall(r"openai==\S+", (SCRIPTS.parents[2] / "Makefile").read_text(encoding="utf-8"))
    pins += re.findall(r"^\S+==\S+", (SCRIPTS.parents[2] / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    table = [line for line in PAGE.splitlines() if line.startswith("| [")]
    named = [found for line in table for found in re.findall(r"([\w-]+) (\d+\.\d+[\d.]*\d)| and (\d+\.\d+[\d.]*\d)", line)]
    assert len(named) == 14
    for name, version, second in named:
        assert f"{name or 'openai'}=={version or second}" in pins
