"""Models are downloaded from a hub with all files that the engine and the gateway need, and no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import AutoModelForCausalLM

from engine import wire
from engine.models.files import ModelError
from engine.models.lenvm import GAMMA_FILE
from engine.models.source import locate, split_revision
from tests.checkpoints import make_checkpoint
from tests.engine.adapters import write_adapter
from tests.processes import Pod

NEEDED = ["config.json", "model.safetensors", "tokenizer.json", GAMMA_FILE, "1_Pooling/config.json", "yardstick.toml"]
OTHERS = ["pytorch_model.bin", "onnx/model.onnx", "README.md"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "76543210fedcba9876543210fedcba9876543210"
REVISIONS = {"main": COMMIT, "v1": OLD_COMMIT, COMMIT: COMMIT, OLD_COMMIT: OLD_COMMIT}
REVISION = re.compile(r"/api/models/me/value(?:/revision/(.+))?")


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that a download uses, with one repository."""

    root: ClassVar[Path | None] = None
    """A checkpoint to serve; None: files that contain their names."""
    resolved: ClassVar[list[str]] = []
    """Revisions that were asked for, in order."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        commit, _, file = path.removeprefix("/me/value/resolve/").partition("/")
        files = [*NEEDED, *OTHERS] if self.root is None else [entry.name for entry in self.root.iterdir()]
        if asked := REVISION.fullmatch(path):
            self._resolve(asked[1] or "main", files)
        elif path.startswith("/api/models/me/value/tree/"):
            tree = [{"type": "file", "path": name, "size": len(self._read(name)), "oid": f"{hash(name):x}"} for name in files]
            self._send(200, json.dumps(tree).encode(), "application/json")
        elif file in files and commit in REVISIONS.values():
            self._send(200, self._read(file), "text/plain", ("X-Repo-Commit", commit))
        else:
            self._send(404, b"{}", "application/json", ("X-Error-Code", "RepoNotFound"))

    def _resolve(self, revision: str, files: list[str]) -> None:
        self.resolved.append(revision)
        if revision not in REVISIONS:
            self._send(404, b"{}", "application/json", ("X-Error-Code", "RevisionNotFound"))
            return
        about = {"id": "me/value", "sha": REVISIONS[revision], "siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(about).encode(), "application/json", ("X-Repo-Commit", REVISIONS[revision]))

    def _read(self, name: str) -> bytes:
        return name.encode() if self.root is None else (self.root / name).read_bytes()

    def _send(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        tag = ("ETag", f'"{self.path.rpartition("/")[2]}-{len(body)}"')
        for name, value in (("content-type", kind), ("content-length", str(len(body))), tag, *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(handler: type[Hub] = Hub) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def located(hub_id: str, endpoint: str, cache: Path, revision: str | None = None) -> subprocess.CompletedProcess[str]:
    """Locate a model in a process of its own, because the hub's library reads its environment when it is imported."""
    program = f"from engine.models.source import locate; print(locate({hub_id!r}, {revision!r}))"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment(endpoint, cache), capture_output=True, text=True, timeout=100, check=False)


def environment(endpoint: str, cache: Path) -> dict[str, str]:
    """The environment of a process that downloads from the hub at ``endpoint``."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return given | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


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


@pytest.mark.slow
def test_a_revision_is_pinned(tmp_path: Path) -> None:
    with hub() as endpoint:
        for revision, commit in ((None, COMMIT), ("v1", OLD_COMMIT), (OLD_COMMIT, OLD_COMMIT)):
            done = located("me/value", endpoint, tmp_path, revision)
            assert Path(done.stdout.splitlines()[-1]).name == commit, done.stderr
        missing = located("me/value", endpoint, tmp_path, "v2")
        assert "The hub model me/value has no revision v2" in missing.stderr
    with pytest.raises(ModelError, match="leave the revision out"):
        locate(tmp_path, "v1")


@pytest.mark.slow
def test_all_processes_of_an_engine_load_one_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch may move while they start, so it is looked up once."""

    class Checkpoint(Hub):
        root = make_checkpoint(tmp_path / "checkpoint", "qwen3")
        resolved: ClassVar[list[str]] = []

    with hub(Checkpoint) as endpoint:
        for name, value in {"ENDPOINT": endpoint, "HOME": str(tmp_path), "HUB_DISABLE_XET": "1", "HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(f"HF_{name}", value)
        arguments = ["--revision", "v1", "--tensor-parallel", "2", "--device", "cpu", "--max-total-tokens", "512", "--threads", "1"]
        pod = Pod("me/value", *arguments)
        try:
            pod.wait_ready()
            info = pod.read("/info", wire.Info)
            assert "yardstick_engine_slots 512.0" in pod.client.get("/metrics").text, "metrics before the first step"
        finally:
            pod.close()
    assert info.model == "value"
    assert Checkpoint.resolved == ["v1"]


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x"])
def test_what_is_no_hub_id_is_looked_for_here_only(name: str) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        locate(name)


def download(endpoint: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.models.download", *arguments]
    return subprocess.Popen(command, env=environment(endpoint, cache), stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_engines_wait_until_another_process_has_downloaded_the_model(tmp_path: Path) -> None:
    """As the init containers of pods wait for a Job. The snapshot's directory alone does not end the wait."""
    with hub() as endpoint:
        (tmp_path / "hub/models--me--value/snapshots" / OLD_COMMIT).mkdir(parents=True)
        with download(endpoint, tmp_path, "--wait=60", "me/value@v1", str(tmp_path)) as waits:
            with download(endpoint, tmp_path, "--wait=0.1", "me/value@v1") as late:
                assert "me/value@v1 was not downloaded within 0.1 s" in late.communicate(timeout=60)[1]
            assert late.returncode == 1
            assert waits.poll() is None
            with download(endpoint, tmp_path, "me/value@v1") as done:
                assert (done.wait(60), waits.wait(60)) == (0, 0)
        with download(endpoint, tmp_path, "me/nothing") as missing:
            assert "engine.models.download: There is no directory and no hub model me/nothing" in missing.communicate(timeout=60)[1]
        assert missing.returncode == 1
    offline = located("me/value", "http://127.0.0.1:1", tmp_path, "v1")
    assert Path(offline.stdout.splitlines()[-1]).name == OLD_COMMIT


@pytest.mark.slow
def test_adapters_are_downloaded_beside_models(tmp_path: Path) -> None:
    """The adapter of a repository is complete on its own: its model's files are others."""

    class Adapter(Hub):
        root = tmp_path / "adapter"

    Adapter.root.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "model.safetensors"):
        (Adapter.root / name).write_text(name)
    with hub(Adapter) as endpoint, download(endpoint, tmp_path, "--wait=60", "--lora=sql=me/value@v1") as waits:
        with download(endpoint, tmp_path, "--lora=sql=me/value@v1", f"--lora=here={tmp_path}") as done:
            assert (done.wait(60), waits.wait(60)) == (0, 0)
        with download(endpoint, tmp_path, "--wait=0.1", "me/value") as other:
            assert "me/value was not downloaded" in other.communicate(timeout=60)[1]
    (snapshot,) = (tmp_path / "hub/models--me--value/snapshots").iterdir()
    assert snapshot.name == OLD_COMMIT
    assert {file.name for file in snapshot.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.slow
def test_an_engine_loads_an_adapter_of_a_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=1)

    class Adapter(Hub):
        root = write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base))
        resolved: ClassVar[list[str]] = []

    with hub(Adapter) as endpoint:
        for name, value in {"ENDPOINT": endpoint, "HOME": str(tmp_path), "HUB_DISABLE_XET": "1", "HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(f"HF_{name}", value)
        pod = Pod(base, "--lora", "sql=me/value@v1", "--device", "cpu", "--max-total-tokens", "512", "--threads", "1")
        try:
            assert [adapter.name for adapter in pod.wait_ready().read("/adapters", wire.Adapters).adapters] == ["sql"]
        finally:
            pod.close()
    assert Adapter.resolved == ["v1"]


def test_a_directory_with_an_at_sign_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / "ranker@home").mkdir()
    assert split_revision(str(tmp_path / "ranker@home")) == (str(tmp_path / "ranker@home"), None)
    assert split_revision("org/ranker@v1") == ("org/ranker", "v1")
    assert split_revision("org/ranker") == ("org/ranker", None)
