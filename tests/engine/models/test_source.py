"""Models are downloaded from a hub with all files that the engine and the gateway need, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.lenvm.pairing import GAMMA_FILE
from engine.models.errors import ModelError
from engine.models.source import locate

NEEDED = ["config.json", "model.safetensors", "tokenizer.json", GAMMA_FILE, "1_Pooling/config.json", "yardstick.toml"]
OTHERS = ["pytorch_model.bin", "onnx/model.onnx", "README.md"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that a download uses, with one repository."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        file = path.removeprefix(f"/me/value/resolve/{COMMIT}/")
        files = [*NEEDED, *OTHERS]
        if path in ("/api/models/me/value", "/api/models/me/value/revision/main"):
            siblings = [{"rfilename": name} for name in files]
            self._send(200, json.dumps({"id": "me/value", "sha": COMMIT, "siblings": siblings}).encode(), "application/json")
        elif path.startswith("/api/models/me/value/tree/"):
            tree = [{"type": "file", "path": name, "size": len(name), "oid": f"{hash(name):x}"} for name in files]
            self._send(200, json.dumps(tree).encode(), "application/json")
        elif file in files:
            self._send(200, file.encode(), "text/plain")
        else:
            self._send(404, b"{}", "application/json", ("X-Error-Code", "RepoNotFound"))

    def _send(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        tag = ("ETag", f'"{self.path.rpartition("/")[2]}-{len(body)}"')
        for name, value in (("content-type", kind), ("content-length", str(len(body))), ("X-Repo-Commit", COMMIT), tag, *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def located(hub_id: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Locate a model in a process of its own, because the hub's library reads its environment when it is imported."""
    program = f"from engine.models.source import locate; print(locate({hub_id!r}))"
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=given | own, capture_output=True, text=True, timeout=100, check=False)


def test_a_model_is_downloaded_with_all_that_is_needed(tmp_path: Path) -> None:
    with hub() as endpoint:
        done = located("me/value", endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        directory = Path(done.stdout.splitlines()[-1])
        assert sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()) == sorted(NEEDED)
        assert (directory / GAMMA_FILE).read_text() == GAMMA_FILE
        missing = located("me/nothing", endpoint, tmp_path)
        assert "There is no directory and no hub model me/nothing" in missing.stderr
    assert located("me/value", endpoint, tmp_path).stdout == done.stdout, "an earlier download is used where there is no network"


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x"])
def test_what_is_no_hub_id_is_looked_for_here_only(name: str) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        locate(name)
