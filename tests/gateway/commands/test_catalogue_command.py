"""``yardstick catalogue``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start
from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.commands import catalogue as command
from yardstick_llm.gateway.commands.catalogue import Columns
from yardstick_llm.gateway.commands.client import Server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"id": f"sku-{number}", "text": f"fox {number}"}) + "\n" for number in range(100)))
    return path


FORM = {"template": ["{item}", "{query}"], "labels": [" Yes", " No"]}


def load(client: httpx.Client, file: Path, *, catalogue: str = "shop", **changes: Any) -> None:
    server = Server(str(client.base_url), changes.pop("api_key", None))
    given: dict[str, Any] = {"form": FORM, "columns": Columns("id", "text"), "batch": 7, "concurrency": 3}
    command.load(server, catalogue, file, **given | changes)


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b"{}", b'"\xff"', b'{"object": "scoring"}'])
def test_another_server_is_told_from_a_gateway(file: Path, body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        access = Server(f"http://127.0.0.1:{server.server_port}", None)
        for run in (command.status, command.delete):
            with pytest.raises(CommandError, match="did not answer as a Yardstick gateway does"):
                run(access, "shop")
        with pytest.raises(CommandError, match="did not answer as a Yardstick gateway does"):
            load(httpx.Client(base_url=access.url), file)
        server.shutdown()


def test_a_file_is_loaded_once(client: httpx.Client, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(client, file)
    assert "shop: 100 added, 0 changed, 0 unchanged" in capsys.readouterr().err
    load(client, file, batch=50)
    assert "shop: 0 added, 0 changed, 100 unchanged" in capsys.readouterr().err
    csv = file.with_suffix(".csv")
    csv.write_text("sku,title\nsku-1,changed\nsku-100,new\n")
    load(client, csv, columns=Columns("sku", "title"), form={})
    assert "shop: 1 added, 1 changed, 0 unchanged" in capsys.readouterr().err
    access = Server(str(client.base_url), None)
    command.status(access, "shop")
    assert json.loads(capsys.readouterr().out)["items"] == 101
    command.delete(access, "shop")
    with pytest.raises(CommandError, match="does not exist"):
        command.status(access, "shop")


def test_requests_have_no_more_tokens_than_gateways_accept(
    client: httpx.Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some texts have a token for each byte."""
    file.write_text("".join(json.dumps({"id": f"sku-{number}", "text": "鞋" * 600}) + "\n" for number in range(700)))
    load(client, file, catalogue="shoes", batch=2000)
    assert "shoes: 700 added" in capsys.readouterr().err


def test_a_preset_that_puts_the_query_first_is_refused(client: httpx.Client, file: Path) -> None:
    with pytest.raises(CommandError, match="puts the query before the document"):
        load(client, file, catalogue="other", form={"preset": True})


def test_a_load_that_breaks_off_is_repeated(client: httpx.Client, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:40], json.dumps({"id": "long", "text": "fox " * 9000}), *lines[40:]]))
    with pytest.raises(CommandError, match=r"rows 36 to 42: the server refused: .*items\[5\].* the same command continues it"):
        load(client, file, concurrency=1)
    file.write_text("\n".join(lines))
    load(client, file)
    assert "shop: 65 added, 0 changed, 35 unchanged" in capsys.readouterr().err
    for content, words in {
        '{"id": "no text"}': "row 1: the column 'text' holds no text",
        "{": "line 1: not a JSON object",
        '{"id": "a space", "text": "a"}': "rows 1 to 1: the server refused: .*regex",
    }.items():
        file.write_text(content)
        with pytest.raises(CommandError, match=words):
            load(client, file)
    command.delete(Server(str(client.base_url), None), "shop")


def test_a_busy_server_is_asked_again(start: Start, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = {"name": "me", "sha256": hashlib.sha256(b"secret").hexdigest(), "concurrency": 1}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}))
    client = start(FakeEngine(), api_keys_file=tmp_path / "keys.json")
    load(client, file, api_key="secret", concurrency=4, batch=20)
    assert "100 added" in capsys.readouterr().err
    with pytest.raises(CommandError, match="valid API key"):
        command.status(Server(str(client.base_url), None), "shop")


def test_the_command_line(client: httpx.Client, file: Path) -> None:
    options = ["load", str(file), "--catalogue", "other", "--url", str(client.base_url), "--template", "{item}{query}"]
    done = subprocess.run(
        [sys.executable, "-m", "yardstick_llm.gateway.cli", "catalogue", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "100 added" in done.stderr) == (0, True), done.stderr
    command.delete(Server(str(client.base_url), None), "other")
