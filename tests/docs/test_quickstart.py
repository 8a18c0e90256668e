"""The blocks of docs/quickstart.md run in their order, each against the server that the page starts before it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import httpx
import pytest

from tests import weights
from tests.docs.test_snippets import ROOT, SERVER, Snippet, snippets
from tests.parts import need
from tests.processes import free_port, wait_until

PAGE = ROOT / "docs" / "quickstart.md"
MOST_SECONDS = 300
START_SECONDS = 200
SERVE = re.compile(r"^\$ (?:\w+=\S+ )?yardstick serve", re.M)
PUBLISHED: dict[str, tuple[str, Callable[[], Path]]] = {
    "sentence-transformers/all-MiniLM-L6-v2": ("sentence-transformers/all-MiniLM-L6-v2", weights.minilm),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("SmolLM2-135M-Instruct.gguf", weights.smollm2),
}
"""Models of the hub that the page serves: the path and the source of the same weights, because tests reach no hub. Those of SmolLM2
are in Q4_1."""


def parts() -> dict[str, list[Snippet]]:
    text = PAGE.read_text(encoding="utf-8")
    headings = [(text.count("\n", 0, found.start()) + 1, found[1]) for found in re.finditer(r"^## (.*)$", text, re.M)]

    def heading(snippet: Snippet) -> str:
        return max((line, name) for line, name in [(0, ""), *headings] if line < snippet.line)[1]

    ours = [snippet for snippet in snippets() if snippet.page == "docs/quickstart.md"]
    return {name: list(group) for name, group in groupby(ours, heading)}


def serve(command: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Run a command of the page, with the weights of a published model and a free port."""
    for name, (path, source) in PUBLISHED.items():
        if name in command:
            link = folder / path
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(source())
            command = command.replace(name, path)
    words = shlex.split(command.removeprefix("$ "))
    place = words.index("yardstick")
    variables = dict(word.split("=", 1) for word in words[:place])
    program = [sys.executable, "-m", "yardstick_llm.gateway.cli", *words[place + 1 :], "--port", str(port)]
    return subprocess.Popen(program, env=os.environ | variables)


PARTS = parts()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in PARTS if name])
def test_a_quickstart_takes_less_than_five_minutes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are forked with their modules imported, which takes seconds of the five minutes otherwise."""
    need("curl")
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    server, port, servers = None, free_port(), 0
    began = time.monotonic()
    try:
        for snippet in PARTS[name]:
            if SERVE.match(snippet.text):
                stop(server)
                port, servers = free_port(), servers + 1
                server = serve(snippet.text, tmp_path, port)
                wait_until(lambda port=port, server=server: is_ready(port, server), START_SECONDS, pause=0.1)
                continue
            text = SERVER.sub(f"http://127.0.0.1:{port}", snippet.text)
            snippet._replace(text=text).run(PATH=path)
    finally:
        stop(server)
    assert servers == 2, "the demo model and a published one"
    assert time.monotonic() - began < MOST_SECONDS


def is_ready(port: int, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server has ended"
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def stop(server: subprocess.Popen[bytes] | None) -> None:
    if server is not None:
        server.terminate()
        server.wait(60)
